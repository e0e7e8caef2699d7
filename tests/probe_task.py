"""A task for tests of the command line: does what `name=` tells, at once."""

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
    if kind == "deaf":  # never polls
        print("started", flush=True)
        time.sleep(60)
    steps = 0
    if kind == "slow":
        while not io.stop.is_set():
            if not steps:
                io.log("started")
            steps += 1
            time.sleep(0.01)
    if kind == "stubborn":
        while not io.stop.is_set():
            io.log("started")
            time.sleep(0.05)
        time.sleep(60)
    if io.run_dir is not None:
        (io.run_dir / "saved").write_text(str(steps))
    return {"loss": np.float32(np.nan), "tokens": np.int64(3), "resumed": io.resume, "lr": cfg["optim.lr"]}
