"""Tests on CUDA: on a GPU, or on a CUDA build of torch under ``tests/cuda/fakecuda``."""
