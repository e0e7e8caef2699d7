"""Weights of other programs: Hugging Face folders and GGUF files in, Hugging Face folders out.

A checkpoint on disk is a `TensorSource` (`tensors.py`). A `Family` (`family.py`, one table each under `families/`) says which model a
config.json means and which of its tensors is which of our parameters; the same table is read in both directions.
"""
