"""In a checkout the installed package's recipe; `push` uploads a copy of it in this file's place."""

from hf_hyperdflash.recipe import generate  # noqa: F401
