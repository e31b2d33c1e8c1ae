"""Planner: the plans of one module under each recipe, and the stage that a call follows."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from duotone.comm import require_same
from duotone.errors import UserError
from duotone.linear.core import Calibrating, LinearStage
from duotone.linear.plan import LinearPlan, PlanRequest, ask_recipe
from duotone.linear.plan_builder import build_plan
from duotone.linear.plane_source import DEQUANTIZE_HELD, USE_HELD
from duotone.linear.sink import GRADIENT, main_grad
from duotone.modules import delayed_states, trace_errors, traced_stages
from duotone.modules.answers import content, shared
from duotone.modules.base import Call, PlannedModule, PlannedStage, Plans
from duotone.modules.parametrizations import reads_without_effect, weights_of
from duotone.modules.row_parts import add_parts
from duotone.modules.same_recipes import WRAPPED
from duotone.modules.sent_weights import require_planes
from duotone.modules.weight_options import WeightOptions
from duotone.modules.weights import demand, follow, is_sent, lacks_rowwise, records_amaxes
from duotone.numbered import ByName
from duotone.pipeline.op import TensorInfo
from duotone.pipeline.row_call import RowPart
from duotone.pipeline.saved_forwards import KEEPS
from duotone.pipeline.slot_roles import ConsumerRoles
from duotone.pipeline.titles import title
from duotone.recipes.recipe import Recipe, drop_dead
from duotone.sharding.dtensors import shard_behind
from duotone.sharding.layout import Layout, compared
from duotone.state import seeds
from duotone.state.autocast_context import active_region
from duotone.state.region import STACK, AmaxMode, CallRegion, in_backward, mode_now
from duotone.state.torch_private import SHAPES, in_pipeline
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.gathers import frees_after_forward

RECIPES = "do not follow the same recipe", "give all of them the same one"
StageKey = tuple[object, ...]


class Planner(Plans):
    """Asks each recipe once, builds plans, and remembers stages by kind of call.

    All of this follows from the module and its recipes, so copies and pickles of the module leave it out.
    """

    def __init__(self, module: PlannedModule) -> None:
        WRAPPED.register()
        super().__init__(module)
        self.options = WeightOptions(self.owner)
        self.consumers = ConsumerRoles()
        self.warned = False
        """Whether the user knows that a quantized weight computes in high precision."""
        self.tapped: Callable[[Recipe], Recipe] | None = None
        """During a sampled step: replaces the recipe of an eager call by one that also records."""
        self.number, self.handle = traced_stages.numbered(self)
        self.forget()

    def forget(self) -> None:
        """Build plans again at the next call. Compiled code does so too if the content of the module has changed."""
        before, self.config = self.config, self._content()
        traced_stages.move(self, before, self.config)
        self.answered = ByName()
        self.bound: dict[str, tuple[AmaxMode, PlannedStage]] = {}
        """Template of a graph, by its name -> the mode and the eager stage of this module."""
        self.followed = ""
        """The name in `bound` whose parameters the delayed states follow now."""
        self.answers = {}
        self.variants: dict[tuple[PlannedStage, bool | str | None, bool, bool, bool], PlannedStage] = {}
        """Stages with cached weights or other gradient sinks, by the plain stage."""
        self.compared: set[tuple[str, tuple[str, ...]]] = set()
        """Groups of ranks, with the formats on which all ranks agreed."""
        self.region = CallRegion()
        self.forget_stages()
        traced_stages.answer_as_others(self)

    def require_same_formats(self, quantizers: tuple[Quantizer, ...], device: str, group: str, *words: str) -> None:
        """UserError on all ranks of the group if they encode differently, or in `words`. They compare once."""
        if torch.compiler.is_dynamo_compiling():
            return
        names = (*words, *[word for quantizer in quantizers for word in compared(quantizer)])
        if (group, names) not in self.compared:
            require_same(names, torch.device(device), group, RECIPES)
            self.compared.add((group, names))

    def retire(self) -> None:
        """The module follows no plan any more. Graphs no longer ask this planner, even if it is still referenced."""
        traced_stages.move(self, self.config, "")
        self.config = ""

    def forget_stages(self) -> None:
        """Build stages again at the next eager call, from the same answers of recipes."""
        self.stages: dict[StageKey, PlannedStage] = {}
        self.last: tuple[StageKey, PlannedStage] | None = None

    def request(self, recipe: Recipe, call: Call | None = None) -> PlanRequest:
        """The request for the module's plan under a recipe. The default `call` is on the weight's device."""
        module = self.module
        with reads_without_effect(module):
            weight, quantizer = module.weights[0], module.weight_held
        call = call or Call(str(weight.device), weight.dtype)
        output, gradient = module.roles_under(recipe.key)
        return PlanRequest(
            recipe,
            module.rules,
            module.module_name,
            module.module_type,
            call.device,
            call.dtype,
            *call.grads,
            site=module.site,
            layout=call.layout or module.layout,
            weight_held=quantizer,
            input_held=call.input_held,
            output_role=output,
            grad_input_role=gradient,
            save_original_input=module.save_original_input,
            weight_shape=weight.shape,
            weight_dtype=weight.dtype,
            weight_is_freed=not (call.is_traced or call.is_joined) and frees_after_forward(module),
            linears=module.num_gemms,
            owner=self.owner,
            is_traced=call.is_traced,
        )

    def plan(self, recipe: Recipe, call: Call | None = None, mode: AmaxMode = AmaxMode.USE) -> LinearPlan:
        """The plan under a recipe. See `answer` for when the recipe is asked."""
        plan = build_plan(self.request(recipe, call), self.answer(recipe))
        if plan.weight.is_kept and any(map(is_sent, weights_of(self.module))):
            require_planes(self.module, plan.weight)
        if mode is AmaxMode.DEFER:  # its recompute takes the seeds of a forward with gradients
            plan = replace(plan, seeds=sum(operand.stream is not None for operand in plan.operands.values()))
        return plan

    def stage(
        self,
        info: TensorInfo,
        weight_grad: bool,
        weight_held: Quantizer | None,
        weight_dtype: torch.dtype,
        layout: Layout | None = None,
        is_joined: bool = False,
    ) -> PlannedStage:
        """The stage of a call, built once for each recipe, dtype, device, layout and pattern of gradients.

        `weight_held`: the quantizer of a quantized weight. `layout`: that of the call, if it is not the module's.
        `is_joined`: the weight may be a copy of several parameters, which is more than its planes.
        """
        compiling = torch.compiler.is_dynamo_compiling()
        # A program of torch.export has no backward. The blocks of rows of one would limit its batches.
        tracked = torch.is_grad_enabled() and not torch.compiler._is_exporting_flag
        module = self.owner()
        assert module is not None
        mode = AmaxMode.USE if compiling else mode_now()
        region = active_region() if compiling else self.region.now(mode)
        recipe, group = (module.recipe, "") if region is None else (region.recipe, region.group)
        if layout is not None:
            group = group or layout.group
        if group and module.all_gemms:  # other ranks hold other experts
            group = module.layout.group
        if recipe.evaluation is not None and not module.training:
            recipe = recipe.evaluation
        if self.tapped is not None:  # compiled code guards on this, and runs eager while it is set
            recipe = self.tapped(recipe)
        grads = (tracked and info.requires_grad, tracked and weight_grad)
        if compiling:
            if region is not None and region.calibrating is not None:
                raise UserError(f"{title(module)}: compiled code calibrates no scales; calibrate in eager code")
            mode = AmaxMode.RECORD if tracked else AmaxMode.DEFER if STACK.defers else AmaxMode.USE
            return self._traced(module, recipe, info, grads, mode, group, weight_held, weight_dtype)
        recorded = None if region is None or region.calibrating is None or in_backward() else region.calibrating
        of_call = info.quantizer, weight_held, recorded, layout, is_joined
        key = (recipe.key, grads, mode, *info[:2], info.index, group, *of_call)
        if (last := self.last) is not None and last[0] == key:
            return last[1]
        stage = self.stages.get(key)
        if stage is None:
            call = Call(info.place, info.dtype, grads, info.quantizer, layout, is_joined=is_joined)
            stage = self.resolve(recipe, call, group, mode, recorded)
            self._drop_dead_plans()
            self.stages[key] = stage
        self._switch_to(stage.plan, mode)
        self.last = (key, stage)
        return stage

    def _content(self) -> str:
        """A name for what decides the module's plans besides recipes. Equal modules share it. "" before `adopt`."""
        module = self.module
        if "rules" not in module.__dict__:
            return ""
        shapes = tuple(None if p is None else tuple(p.shape) for p in module._parameters.values())
        options = module.module_type, module.num_gemms, module.save_original_input, module.layout
        return content((type(module), shapes, *options))

    def _traced(
        self,
        module: PlannedModule,
        recipe: Recipe,
        info: TensorInfo,
        grads: tuple[bool, bool],
        mode: AmaxMode,
        group: str,
        quantizer: Quantizer | None,
        weight_dtype: torch.dtype,
    ) -> PlannedStage:
        """`stage` in a trace: all modules of this content share it."""
        traced_stages.ask(self.config, recipe.key)
        if quantizer is not None and any(lacks_rowwise(weight) for weight in module.weights):
            trace_errors.refuse_recompute()
        input_held = "" if info.quantizer is None else info.quantizer.words
        formats = traced_stages.formats_of(quantizer)
        where = (info.place, str(info.dtype), group, weight_dtype is not info.dtype, formats, input_held)
        key = self.config, getattr(self.answered, recipe.key), recipe.key, *grads, mode.value
        name = traced_stages.plan_name((*key, *where))
        stage = traced_stages.template_of(name).stage
        return stage

    def answer(self, recipe: Recipe) -> dict[str, Quantizer]:
        """The quantizer that a recipe gives each slot. A recipe that is a function is called once per slot."""
        key = recipe.key
        if key not in self.answers:
            drop_dead(self.answers)
            drop_dead(vars(self.answered))
            self.answers[key] = ask_recipe(self.request(recipe))
        if not hasattr(self.answered, key):
            self.answers[key] = answers = shared(self.answers[key])
            setattr(self.answered, key, answers.name)
        return self.answers[key]

    def template(self, name: str, recipe: Recipe, call: Call, mode: AmaxMode) -> PlannedStage:
        """The stage that all modules of equal content share in graphs, under its name."""
        module, plan = self.module, self.plan(recipe, call, mode)
        module.require_whole()
        part = f"{name}@{plan.digest}"
        linear = LinearStage(plan, GRADIENT, part, RowPart(part).text, not plan.is_shared)
        stage = module.make_stage([linear] * module.num_gemms)
        add_parts(part, name, stage, module, call)
        return stage

    def eager_stage(self, plan: str, first: bool | None) -> PlannedStage:
        """The stage that an op of a graph runs for this module. `plan` names the template. `first`: see `variant`."""
        mode, stage = self.follow(plan)
        return self._variant(stage, first, overwrites=first is True and mode is not AmaxMode.USE and not in_backward())

    def follow(self, name: str) -> tuple[AmaxMode, PlannedStage]:
        """The mode and the eager stage of this module for a template. Delayed states then follow it."""
        module = self.module
        if name not in self.bound:
            if not hasattr(traced_stages.PLANS, name):
                raise UserError(f"{title(module)}: its recipe is gone; keep it until the compiled backward ends")
            template = traced_stages.template_of(name)
            plans = self.bind(template.stage.plan, template.group, template.mode)
            self.bound = {name: entry for name, entry in self.bound.items() if hasattr(traced_stages.PLANS, name)}
            self.bound[name] = template.mode, module.make_stage([LinearStage(each, GRADIENT) for each in plans])
        mode, stage = self.bound[name]
        # Another recipe may have given the states other parameters since. An evaluation leaves them as they are.
        if self.followed != name and mode is not AmaxMode.USE and stage.plan.is_delayed:
            delayed_states.states_for(module, stage.plan)
            self.followed = name
        return mode, stage

    def _drop_dead_plans(self) -> None:
        """Forget the plans of recipes that no longer exist: a program may create a recipe for each step."""
        drop_dead(self.stages)
        live = {id(stage) for stage in (*self.stages.values(), *(stage for _, stage in self.bound.values()))}
        self.variants = {key: stage for key, stage in self.variants.items() if id(key[0]) in live}

    def _switch_to(self, plan: LinearPlan, mode: AmaxMode) -> None:
        """Let delayed states, and the next write into quantized weights, follow this plan."""
        module = self.module
        if plan.is_delayed and mode is not AmaxMode.USE:
            delayed_states.states_for(module, plan)  # another recipe may have given the states other parameters since
            self.followed = ""
        for weight in weights_of(module):
            if not isinstance(weight, QuantizedTensor):
                return
            if plan.weight.source is DEQUANTIZE_HELD and not self.warned and not in_pipeline(SHAPES):
                self.warned = True
                message = f"{title(module)}: the weight is held quantized and computes here in high precision"
                warnings.warn(f"{message}; its values are dequantized in every forward", stacklevel=7)
            if plan.weight.source is USE_HELD:
                demand(weight, plan.weight.usage, module)
                for written in (weight, shard_behind(weight)) if mode is not AmaxMode.USE else ():
                    follow(written, plan.weight.quantizer)

    def resolve(
        self, recipe: Recipe, call: Call, group: str = "", mode: AmaxMode = AmaxMode.USE, recorded: Recipe | None = None
    ) -> PlannedStage:
        """The stage of a call, with the states that delayed scaling needs.

        `recorded` is the recipe whose delayed scales the call calibrates.
        """
        module = self.module
        if call.layout is None:
            module.require_whole()
        plans = self.bind(self.plan(recipe, call, mode), group, mode)
        seeds.warn_of_load(module, plans[0].seeds)
        if recorded is None:
            return module.make_stage([LinearStage(plan, GRADIENT) for plan in plans])
        other = self.plan(recorded, Call(call.device, call.dtype, (False, False)), AmaxMode.RECORD)
        calibrated = self.bind(other, group, AmaxMode.RECORD)
        pairs = zip(plans, calibrated, strict=True)
        return module.make_stage([Calibrating(plan, GRADIENT, recording=other) for plan, other in pairs])

    def bind(self, plan: LinearPlan, group: str, mode: AmaxMode) -> Sequence[LinearPlan]:
        """The plan of each linear, with its places in delayed states. RecipeError if ranks disagree on scales."""
        if plan.is_delayed:
            delayed_states.require_reduction(self.module, plan, group)
        return self._with_states(plan, group, mode)

    def _with_states(self, plan: LinearPlan, group: str, mode: AmaxMode) -> Sequence[LinearPlan]:
        """The plan of each linear with its slots in the delayed states, which are created if they are absent."""
        module = self.module
        if not plan.is_delayed:
            return [plan] * module.num_gemms
        numbers = delayed_states.states_of_call(module, plan, group, mode)
        for member, weight in enumerate(weights_of(module)):
            if isinstance(weight, QuantizedTensor):
                followed = delayed_states.with_slots(plan, numbers, group, AmaxMode.RECORD, member)
                delayed_states.attach(weight, followed.weight)
        return [delayed_states.with_slots(plan, numbers, group, mode, member) for member in range(module.num_gemms)]

    def prepare(self, recipe: Recipe) -> None:
        """Create the states that delayed scaling under the recipe needs, so that checkpoints contain them."""
        weight = weights_of(self.module)[0]
        self._with_states(self.plan(recipe, Call(str(weight.device), weight.dtype, (False, False))), "", AmaxMode.USE)

    def variant(self, stage: PlannedStage, first: bool | Tensor | None) -> PlannedStage:
        """The stage with the module's caches and sinks. MissingPlaneError if a `main_grad` is missing."""
        module = self.module
        if torch.compiler._is_exporting_flag:  # torch 2.11 takes every trace for an export by the public name
            trace_errors.refuse_export(f"{title(module)}: {KEEPS}, and cannot be exported: leave them out")
        if first is not None and any(map(records_amaxes, module.weights)):
            raise UserError(
                f"{title(module)}: under delayed scaling gather_quantized encodes a weight for each microbatch; "
                "leave is_first_microbatch out, or use quantized parameters (duotone.convert_parameters)"
            )
        self.options.require_parameters()
        compiling = torch.compiler.is_dynamo_compiling()
        if isinstance(first, Tensor):
            if compiling or first.numel() != 1:
                raise UserError(f"{title(module)}: is_first_microbatch as a tensor has one element, in eager code")
            if first.device != (device := module.weights[0].device):
                raise UserError(f"is_first_microbatch is on {first.device} and the weight on {device}; move it there")
            self.options.flag = first
        if compiling and not isinstance(first, Tensor):
            return stage.in_rows(self.options.row_part(stage, first).text)
        # A recompute is no new microbatch.
        return self._variant(stage, first, first is True and mode_now() in (AmaxMode.RECORD, AmaxMode.DEFER))

    def _variant(self, stage: PlannedStage, first: bool | Tensor | None, overwrites: bool) -> PlannedStage:
        module = self.module
        if module.fuse_wgrad_accumulation and stage.plan.weight_grad:
            for weight in module.weights:
                if weight.requires_grad:
                    main_grad(weight)
        flag = "tensor" if isinstance(first, Tensor) else first
        key = stage, flag, overwrites, module.fuse_wgrad_accumulation, module.delay_wgrad_compute
        if key not in self.variants:
            self.variants[key] = module.make_variant(stage, first, overwrites)
        return self.variants[key]
