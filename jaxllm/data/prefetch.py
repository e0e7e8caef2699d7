"""Making the next items in a background thread while the present one is used."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """What the two threads share. Apart from `Prefetch`, so that the thread does not keep a forgotten one alive."""

    def __init__(self, depth: int):
        self.depth = depth
        self.ready: deque[tuple[int, T]] = deque()
        self.error: BaseException | None = None
        self.done = self.closed = False
        self.changed = threading.Condition()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()


class Prefetch(Generic[T], Iterator[tuple[int, T]]):
    """Iterates over `(i, make(i))` for i = start, start + 1, ... (to `stop`), with up to `depth` of them made ahead.

    `make` must be a pure function: what was made ahead and never taken is simply dropped. An exception of `make` is
    raised by `next` once the items before it are taken. `close`, a `with` block, garbage collection and the end of the
    program all end the thread.
    """

    def __init__(self, make: Callable[[int], T], start: int, depth: int = 2, stop: int | None = None):
        if depth < 1:
            raise ValueError(f"depth {depth} < 1")
        self._shared: Shared[T] = Shared(depth)
        self._thread = threading.Thread(
            target=work, args=(self._shared, make, start, stop), daemon=True, name="jaxllm-prefetch"
        )
        self._finish = weakref.finalize(self, shut, self._shared, self._thread)
        self._thread.start()

    def __next__(self) -> tuple[int, T]:
        shared = self._shared
        with shared.changed:
            while not shared.ready and shared.error is None and not shared.done and not shared.closed:
                shared.changed.wait()
            if shared.closed:
                raise StopIteration
            if shared.ready:
                item = shared.ready.popleft()
                shared.changed.notify_all()
                return item
            error = shared.error
        if error is not None:
            self.close()
            raise error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread and waits for it. May be called twice."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shut(shared: Shared[T], thread: threading.Thread) -> None:
    shared.close()
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join()


def work(shared: Shared[T], make: Callable[[int], T], start: int, stop: int | None) -> None:
    """The background thread."""
    index = start
    while True:
        with shared.changed:
            while len(shared.ready) >= shared.depth and not shared.closed:
                shared.changed.wait()
            shared.done = stop is not None and index >= stop
            if shared.closed or shared.done:
                shared.changed.notify_all()
                return
        try:
            item = make(index)
        except BaseException as error:
            with shared.changed:
                shared.error = error
                shared.changed.notify_all()
            return
        with shared.changed:
            if shared.closed:
                return
            shared.ready.append((index, item))
            shared.changed.notify_all()
        index += 1
