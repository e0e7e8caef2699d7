"""A list of layers as a layer string with as few different blocks to compile as possible (see `jaxllm.pattern`)."""

from collections.abc import Sequence

Pair = tuple[str, str]  # roles of a mixer and an ffn

LONGEST = 16  # layers of a period that are looked for


def layer_string(layers: Sequence[Pair]) -> str:
    """The string whose groups cover `layers` with the fewest blocks: `[(a, x)] * 4` gives `4* a/x`.

    Least total length of periods first (each is compiled once), then fewest groups; a dynamic programme over prefixes.
    """
    best: list[tuple[int, int, list[tuple[int, int, int]]]] = [
        (0, 0, [])
    ]  # per prefix: blocks, groups, (start, period, repeats)
    for end in range(1, len(layers) + 1):
        options = []
        for period in range(1, min(LONGEST, end) + 1):
            start = end
            while start - period >= 0 and layers[start - period : start] == layers[end - period : end]:
                start -= period
                blocks, groups, parts = best[start]
                options.append((blocks + period, groups + 1, [*parts, (start, period, (end - start) // period)]))
        best.append(min(options, key=lambda option: option[:2]))
    return " | ".join(_group(layers[start : start + period], repeats) for start, period, repeats in best[-1][2])


def _group(period: Sequence[Pair], repeats: int) -> str:
    words: list[str] = []
    i = 0
    while i < len(period):
        n = i
        while n < len(period) and period[n] == period[i]:
            n += 1
        words.append("/".join(period[i]) + (f"*{n - i}" if n - i > 1 else ""))
        i = n
    return (f"{repeats}* " if repeats > 1 else "") + " ".join(words)
