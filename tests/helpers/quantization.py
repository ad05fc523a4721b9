"""Weights as DeepSeek-V4's checkpoints store them and as torchao holds them, and what they stand for."""

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


class Int8Weight(torch.Tensor):
    """As torchao's int8 weight: made of integers and scales, and of all operations it knows a linear layer's."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            states, weight, *bias = args
            return func(states, weight.data_.to(weight.scale) * weight.scale, *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale)
        raise NotImplementedError(f"Int8Weight dispatch: unimplemented {func}")


def as_int8(model):
    """Its linear layers' weights but the LM head's as [`Int8Weight`]."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            data = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = torch.nn.Parameter(Int8Weight(data, scale), requires_grad=False)
    return model
