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
    proposed, draft = [], type(drafter).draft
    drafter.draft = lambda *args: proposed.append(draft(drafter, *args)) or proposed[-1]
    out = target.generate(ids, assistant_model=drafter, **options)
    del drafter.draft
    return out, [tree.tokens.tolist() for (tree,) in proposed if len(tree)]
