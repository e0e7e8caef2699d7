"""A task for tests of the command line: does what `name=` tells, at once."""

import os
import time

import numpy as np

from jaxllm.errors import UserError


def run(cfg, io):
    kind, _, argument = cfg.name.partition(":")
    if kind == "bug":
        raise RuntimeError("boom")
    if kind == "mistake":
        raise UserError("data.path=nowhere:\nno such file")
    if kind == "full":
        raise OSError(28, "No space left on device", "tokens.bin")
    if kind == "stray":
        print("stray text of some package")
        io.emit("some text")
    steps = 0
    if kind == "polite":  # a signal arrives; the task stops at its next poll
        while not io.stop.is_set():
            steps += 1
            os.kill(os.getpid(), int(argument))
    if kind == "deaf":  # a signal arrives; the task has never polled
        os.kill(os.getpid(), int(argument))
        time.sleep(30)
    if kind == "stubborn":  # polls, and goes on
        io.stop.is_set()
        for _ in range(2):
            os.kill(os.getpid(), int(argument))
            time.sleep(1)
    if io.run_dir is not None:
        (io.run_dir / "saved").write_text(str(steps))
    return {"loss": np.float32(np.nan), "tokens": np.int64(3), "resumed": io.resume, "lr": cfg["optim.lr"]}
