"""Faults of token routing: who takes part, what is gathered, which keys are seen."""

from tests.mutants.runner import Mutant

EXPERT = "model/depth/test_expert_choice.py::test_"
TOKEN = "model/depth/test_token_choice.py::test_"

MUTANTS = [
    Mutant(
        "tokens_come_back",
        "A token that a loop has left out may take part in a later one",
        "deeploop/model/depth/expert_choice.py",
        "scores = logit.detach().masked_fill(routing.loops != loop, -torch.inf)",
        "scores = logit.detach()",
        EXPERT + "expert_choice_is_its_definition",
    ),
    Mutant(
        "top_k_outside_of_training",
        "In eval mode, too, the highest scores of the sequence are chosen, later ones among them",
        "deeploop/model/depth/expert_choice.py",
        "elif self.training:",
        "elif logit.shape[1] > 1:",
        EXPERT + "outside_of_training_no_token_sees_later_ones",
    ),
    Mutant(
        "choice_in_order_of_score",
        "The chosen tokens stand in no order, so that attention lets them see later ones",
        "deeploop/model/depth/expert_choice.py",
        ".indices.sort().values",
        ".indices",
        EXPERT + "expert_choice_is_its_definition",
    ),
    Mutant(
        "fit_over_all_tokens",
        "The routers' cross-entropy counts tokens that were not to choose from",
        "deeploop/model/depth/expert_choice.py",
        "torch.where(may, fit, 0).sum() / count",
        "fit.mean()",
        EXPERT + "the_penalty_is_the_cross_entropy_of_telling_the_choice",
    ),
    Mutant(
        "positions_close_up",
        "Gathered tokens are rotated as if they stood side by side",
        "deeploop/model/state.py",
        "rope=(cos[places], sin[places])",
        "rope=(cos[: places.shape[1]], sin[: places.shape[1]])",
        EXPERT + "expert_choice_is_its_definition",
    ),
    Mutant(
        "input_of_the_first_tokens",
        "The loops' input is that of the first tokens, not of the gathered ones",
        "deeploop/model/state.py",
        "return x if self.places is None else take(x, self.places)",
        "return x if self.places is None else x[:, : self.places.shape[1]]",
        EXPERT + "expert_choice_is_its_definition",
    ),
    Mutant(
        "weights_of_the_first_tokens",
        "A gathered token has the weight of another one",
        "deeploop/model/depth/mor.py",
        "w.gather(1, places)",
        "w[:, : places.shape[1]]",
        EXPERT + "expert_choice_is_its_definition",
    ),
    Mutant(
        "keys_of_all_tokens",
        "Tokens that do not take part in a loop are seen in it",
        "deeploop/model/depth/mor.py",
        "inputs if self.shares_keys else inputs._replace(valid=took)",
        "inputs",
        TOKEN + "token_choice_is_its_definition",
    ),
    Mutant(
        "cached_keys_of_all_tokens",
        "Tokens of an earlier piece that did not take part are seen through the cache",
        "deeploop/model/kv/cache.py",
        "self.valid[slot, :, self.length : end] = valid",
        "self.valid[slot, :, self.length : end] = True",
        EXPERT + "cache_on_equals_cache_off",
    ),
    Mutant(
        "first_keys_of_later_tokens",
        "Queries over the first loop's keys see the token after them",
        "deeploop/model/depth/mor.py",
        "<= places[..., None]",
        "<= places[..., None] + 1",
        EXPERT + "expert_choice_is_its_definition",
    ),
    Mutant(
        "first_keys_of_the_first_block",
        "Every block of a later loop reads the keys of the first block",
        "deeploop/model/looplm.py",
        "first=s.kv[visit.block - self.config.prelude]",
        "first=s.kv[0]",
        EXPERT + "expert_choice_is_its_definition",
    ),
    Mutant(
        "balance_of_a_batch",
        "The balance loss is taken over the tokens of all sequences of a micro-batch",
        "deeploop/model/depth/token_choice.py",
        "(share * mean).sum(-1).mean()",
        "(share.mean(0) * mean.mean(0)).sum(-1)",
        TOKEN + "two_sizes_of_micro_batch_give_the_same_gradients",
    ),
    Mutant(
        "capacity_of_tokens_left_out",
        "The slots that experts drop are counted as if every loop had all tokens",
        "deeploop/model/moe/layer.py",
        "tokens = load.sum(-1, keepdim=True).double() / self.top_k",
        "tokens = load.sum(-1).max().double() / self.top_k",
        "train/test_trainer_loom.py::test_dropped_slots_are_those_that_weigh_nothing",
    ),
]
