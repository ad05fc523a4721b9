"""Weights as DeepSeek-V4's checkpoints store them, and what they stand for, element by element."""

import math

import torch


def quantize_fp8(shape, block, generator):
    """A random FP8 weight, its scales, and its values."""
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    grid = [math.ceil(size / b) for size, b in zip(shape, block)]
    scale = 2.0 ** torch.randint(-6, 0, grid, generator=generator).float()
    values = torch.empty(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            values[i, j] = float(weight[i, j]) * float(scale[i // block[0], j // block[1]])
    return weight, scale, values


def quantize_fp4(shape, generator):
    """A random FP4 weight, packed, its scales, and its values."""
    rows, columns = shape
    packed = torch.randint(-128, 128, (rows, columns // 2), generator=generator).to(torch.int8)
    scale = 2.0 ** torch.randint(-6, 0, (rows, columns // 32), generator=generator).float()
    values = torch.empty(shape)
    for i in range(rows):
        for j in range(columns):
            byte = int(packed[i, j // 2]) % 256
            code = byte % 16 if j % 2 == 0 else byte // 16
            exponent, mantissa = code // 2 % 4, code % 2
            number = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
            values[i, j] = (-number if code >= 8 else number) * float(scale[i, j // 32])
    return packed, scale, values
