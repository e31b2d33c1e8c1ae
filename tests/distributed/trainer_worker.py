"""The laboratory's trainer over two ranks against one process."""

from pathlib import Path

import checks
from checks import check, same

from duotone import recipes
from duotone.lab import data, presets
from duotone.lab.parallel import Parallel, ParallelTrainer
from duotone.lab.trainer import TrainConfig, Trainer

CASES = (
    (Parallel(fsdp=2), "gpt", "fp8-delayed"),
    (Parallel(tp=2), "gpt", "mxfp8"),
    (Parallel(ep=2), "moe", "fp8-current"),
)


@check
def losses_are_those_of_one_process_up_to_the_order_of_sums(folder: Path) -> None:
    corpus = data.load((), context=presets.get("tiny").model.context)
    for parallel, model, recipe in CASES:
        config = TrainConfig(presets.get("tiny"), steps=4, model=model)
        trainer = ParallelTrainer(parallel, config, recipes.load(recipe), corpus)
        one = Trainer(config, recipes.load(recipe), corpus)
        pairs = [(trainer.step(), one.step()) for _ in range(4)]
        pairs.append((trainer.heldout_loss(), one.heldout_loss()))
        assert all(abs(got - want) < 4e-3 * want for got, want in pairs), (parallel, pairs)
        assert {row.module for row in trainer.plan()} == {row.module for row in one.plan()}
        assert len(trainer.ranks()) == 2


@check
def a_resumed_trainer_has_the_bits_of_one_that_went_on(folder: Path) -> None:
    corpus = data.load((), context=presets.get("tiny").model.context)
    for parallel, model, recipe in CASES:
        config = TrainConfig(presets.get("tiny"), steps=4, model=model)
        trainer, resumed = (ParallelTrainer(parallel, config, recipes.load(recipe), corpus) for _ in range(2))
        trainer.step(), trainer.step()
        trainer.save(folder / str(parallel), {"train_loss": [[1, 0.5]]})
        losses = trainer.step(), trainer.step()
        history = resumed.resume(folder / str(parallel) / "step-00000002")
        assert history == {"train_loss": [[1, 0.5]]} and resumed.done == 2
        assert (resumed.step(), resumed.step()) == losses, parallel
        state, want = resumed.optimizer.state(), trainer.optimizer.state()
        assert state.keys() == want.keys()
        for name, tensor in want.items():
            same(state[name], tensor, f"{parallel}, {name}")


if __name__ == "__main__":
    checks.main()
