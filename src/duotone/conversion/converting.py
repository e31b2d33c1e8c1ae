"""convert and revert: models in place.

Converting an nn.Linear only changes its class: parameters, names, hooks and state_dict keys stay. Experts with 3-D
parameters keep these too.
"""

from collections.abc import Sequence

from torch import nn

from duotone.attention import DotProductAttention
from duotone.conversion import experts, fusing
from duotone.conversion.attention_cores import add_cores, refuse_other_attention, refuse_without_interface, remove_cores
from duotone.conversion.default_rules import with_default_rules
from duotone.conversion.forwards import CONVERTED, close_fast_paths, open_fast_paths
from duotone.conversion.naming import named_modules, require_model, sites_of
from duotone.conversion.skipped import refuse_skipped, skipped_modules
from duotone.conversion.targets import parametrized_since, release, targets
from duotone.conversion.warnings import Place, report_unmatched, warn_of_surprises
from duotone.errors import UserError
from duotone.modules.delayed_checkpoint import state_names
from duotone.modules.parametrizations import reads_without_effect
from duotone.modules.planned import Planned
from duotone.modules.same_recipes import leave_to_ranks
from duotone.modules.weights import show_values
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.rules import OUTPUT_HEAD, Rule, require_rules
from duotone.recipes.schedule import Phase, Schedule
from duotone.state.autocast_context import HIGH_PRECISION
from duotone.tensor import QuantizedTensor

IGNORED = "_keys_to_ignore_on_save"
"""The attribute in which models of transformers name tensors that `save_pretrained` leaves out."""


def convert(
    model: nn.Module,
    recipe: RecipeLike,
    rules: Sequence[Rule] = OUTPUT_HEAD,
    *,
    schedule: Schedule | None = None,
    fuse: bool = False,
) -> nn.Module:
    """Make every nn.Linear, and all linears of experts, follow `recipe`, in place, and return the model.

    - `rules` go before any recipe, also before that of an enclosing autocast. After them come the default rules, which
      keep output heads, low-rank adapters and routers of experts in high precision. `rules=()` turns these off. A rule
      that matches nothing gives a warning and a row of `plan`.
    - `schedule` starts with the recipe. All its phases are checked; `autocast(recipe=schedule.at(step))` follows it.
    - `fuse` also runs norms, linears and activations as pipelines, as `duotone.fuse` does.
    - Modules of Duotone take the recipe, the rules and their full names too.
    - Subclasses of nn.Linear with another forward, and other modules that hold matrices, are not converted. `plan`
      shows them. Under `strict` they are an error unless a rule or the recipe asks for high precision.
    - If an interrupt (Ctrl-C) stops it, another call of `convert` or of `revert` completes or undoes the work.

    RecipeError or UserError, before anything changes, if a recipe cannot be used.
    """
    recipe = _validated(model, recipe, rules, schedule)
    recipes = [recipe] if schedule is None else [phase.recipe for phase in schedule.phases]
    with reads_without_effect(model):
        all_rules = with_default_rules(rules, model, recipes)
    return convert_by(model, recipe, all_rules, schedule=schedule, fuse=fuse)


def convert_by(
    model: nn.Module, recipe: Recipe, rules: tuple[Rule, ...], *, schedule: Schedule | None = None, fuse: bool = False
) -> nn.Module:
    """Do the work of `convert` with exactly these rules, without the default ones.

    What an interrupt left in the middle of `convert` or `revert` is taken back first.
    """
    for module in [module for module in model.modules() if module.__dict__.get(CONVERTED) is False]:
        release(module)
    refuse_without_interface(model)
    with reads_without_effect(model):
        _adopt(model, recipe, rules, schedule)
    close_fast_paths(model)
    leave_to_ranks(model)
    _save_pretrained_weights_alone(model)
    return fusing.fuse(model) if fuse else model


def _adopt(model: nn.Module, recipe: Recipe, all_rules: tuple[Rule, ...], schedule: Schedule | None) -> None:
    """Check everything, then let each linear follow the recipe."""
    sites = sites_of(model)
    phases = schedule.phases if schedule is not None else (Phase(recipe, 0),)
    skipped = skipped_modules(model)
    planned = [(target, target.check(phases, all_rules)) for target in targets(model, skipped, sites)]
    for phase in phases:
        for used in (phase.recipe, phase.recipe.evaluation):
            if used is not None and used.strict:
                refuse_skipped(skipped, used, all_rules, sites)
                refuse_other_attention(model, used)
    places: list[Place] = [(target.module_type, target.name, target.site) for target, _ in planned]
    places += [("linear", name, sites[name]) for name in skipped]
    for phase in phases:
        report_unmatched(phase.recipe, all_rules, places)
    warn_of_surprises(model, recipe, all_rules, sites, skipped, planned)
    for target, slots in planned:
        target.adopt(recipe, all_rules, slots)
    add_cores(model)
    _tell_the_rest(model, recipe, [target.name for target, _ in planned])


def _tell_the_rest(model: nn.Module, recipe: Recipe, named: Sequence[str]) -> None:
    """Give names and the recipe to modules of Duotone that are no targets: attention, and owners of linears."""
    sites = sites_of(model)
    for name, module in named_modules(model):
        take = getattr(module, "take_name", None)
        if callable(take) and name and name not in named and not isinstance(module, Planned):
            take(name, sites[name])
        if isinstance(module, DotProductAttention):
            module.recipe = recipe


def _save_pretrained_weights_alone(model: nn.Module) -> None:
    """Keep delayed states out of what `save_pretrained` of transformers writes: plain models do not expect them."""
    for module in model.modules():
        if hasattr(module, IGNORED):
            setattr(module, IGNORED, {*(getattr(module, IGNORED) or ()), *state_names(module)})


def require_schedule(schedule: Schedule | None) -> None:
    """UserError unless this is a schedule or None."""
    if not isinstance(schedule, Schedule | None):
        kind = type(schedule).__name__
        raise UserError(f"schedule is a duotone.recipes.Schedule; got {kind}: use duotone.recipes.load_schedule(name)")


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert` and `fuse`, in place, and return the model. Modules get their old classes.

    Seeds and delayed states are removed. Modules of Duotone stay and run in high precision. Quantized parameters stay
    quantized: to make them plain, call `convert_parameters(model, "bf16")` first. UserError, before anything changes,
    if a module was parametrized after it was converted.
    """
    require_model("revert", model)
    for name, module in named_modules(model):
        if isinstance(module, Planned) and parametrized_since(module):
            raise UserError(f"{name} was parametrized after it was converted; remove its parametrizations first")
    fusing.unfuse(model)
    remove_cores(model)
    open_fast_paths(model)
    for module in list(model.modules()):
        if CONVERTED in module.__dict__:
            release(module)
        elif isinstance(module, experts.ExpertsLinear):
            continue  # the owner of the plan drops it
        elif isinstance(module, Planned):
            module.adopt(HIGH_PRECISION, (), module.module_name, module.site)
        elif isinstance(module, DotProductAttention):
            module.recipe = HIGH_PRECISION
        if any(isinstance(parameter, QuantizedTensor) for parameter in module._parameters.values()):
            show_values(module)
    return model


def _validated(model: nn.Module, recipe: RecipeLike, rules: Sequence[Rule], schedule: Schedule | None) -> Recipe:
    """The recipe. UserError if an argument is of another kind, or does not fit the others."""
    require_model("convert", model)
    if isinstance(recipe, Schedule):
        raise UserError(
            f"convert takes a recipe, and schedule {recipe.title} one for each step: call convert(model, "
            "schedule.at(0), schedule=schedule), and train step i under duotone.autocast(recipe=schedule.at(i))"
        )
    recipe = as_recipe("convert", recipe)
    require_schedule(schedule)
    if schedule is not None and schedule.phases[0].recipe != recipe:
        raise UserError(f"recipe {recipe.name} is not what schedule {schedule.title} starts with; give schedule.at(0)")
    require_rules(rules)
    return recipe
