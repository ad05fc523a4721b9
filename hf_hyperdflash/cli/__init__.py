"""The `hf-hyperdflash` command."""
