"""In a checkout the installed package's recipe; `push` uploads a copy of it in this file's place."""

# In a `try`: else transformers, which looks for imports, says to install a package of this name from PyPI.
try:
    from hf_hyperdflash.portable.generate import generate  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"This drafter runs on the package of the repository that its folder belongs to ({error}). Run `pip install "
        "-e .` in the repository's root."
    ) from error
