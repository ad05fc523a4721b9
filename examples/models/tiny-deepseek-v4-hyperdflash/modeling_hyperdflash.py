"""In a checkout the drafter runs on the installed package; `push` uploads a copy of the code in this file's place."""

from hf_hyperdflash.modeling_hyperdflash import HyperDFlashConfig, HyperDFlashDrafter  # noqa: F401
