"""`transformers serve`, drafting: the same server, endpoints and text, fewer forwards of the target a token.

    python examples/serve_with_drafter.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash
    transformers chat examples/models/tiny-deepseek-v4 http://localhost:8000 max_new_tokens=96

The server is transformers' own class, which loads the target; then the drafter becomes that target's default.
Requests that come before are answered without it. Needs `transformers[serving]`. Nothing for
`--continuous-batching`, which calls no `generate`.
"""

from __future__ import annotations

import argparse

from hf_hyperdflash import load_drafter

try:
    from transformers.cli.serve import Serve
except ImportError as error:
    raise SystemExit(f"Error: {error}.") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="of the target")
    arguments = parser.parse_args()
    server = Serve(
        arguments.target, host=arguments.host, port=arguments.port, device=arguments.device, dtype=arguments.dtype,
        non_blocking=True,
    )  # fmt: skip
    try:
        manager = server._model_manager  # which knows its models by names of its own
        target, _ = manager.load_model_and_processor(manager.process_model_name(arguments.target))
        load_drafter(arguments.drafter, target=target).bind(target, as_default=True)
    except Exception as error:
        server.kill_server()
        raise SystemExit(f"{error}") from None
    print(
        f"{arguments.target} drafts with {arguments.drafter} on http://{arguments.host}:{arguments.port}", flush=True
    )


if __name__ == "__main__":
    main()
