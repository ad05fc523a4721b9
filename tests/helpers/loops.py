"""Drafters in transformers' loop and in ours."""

from transformers.generation.utils import GenerationMixin


def in_transformers_loop(target, drafter, ids, **options):
    """As somebody does it who calls that loop, or has a copy of it."""

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return GenerationMixin._assisted_decoding(
            model, input_ids, logits_processor, stopping_criteria, generation_config, assistant_model=drafter, **kwargs
        )

    return target.generate(ids, custom_generate=loop, **options)


def proposed_by(drafter, target, ids, **options):
    """The text, and what was drafted for it round by round."""
    proposed, propose = [], type(drafter).propose
    drafter.propose = lambda *args: proposed.append(propose(drafter, *args)) or proposed[-1]
    out = target.generate(ids, assistant_model=drafter, **options)
    del drafter.propose
    return out, [tree.tokens.tolist() for tree in proposed if len(tree)]
