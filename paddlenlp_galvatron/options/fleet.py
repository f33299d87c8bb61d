"""Reads a PaddleFleet recipe as a plan, with its surprises and refusals. `fleet_fields` has its fields, the
rules of layers are in `plan.fleet_layers`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple

from ..base import UserError, count
from ..model import ModelShape, Recompute
from ..plan import Assumptions, DataParallel, LayerStrategy, Plan, VocabStrategy, find_faults
from ..plan import fleet_layers as rules
from ..plan.strategy import sharded_over_all
from .fleet_fields import fields_of, unread_notes

# Modules that PaddleFleet recomputes, but no plan can state.
UNSTATED = (
    *("moe_act", "moe_premute", "gated_attn", "mla_qkv_recompute", "full_attn", "vha_postmix"),
    *("dsv4_hybrid_attn_qkv", "dsv4_hybrid_attn_post_core", "rms_norm_gated", "mhc_forward", "mhc_block"),
)
FREED = {"norm": "row statistics", "core_attn": "the sums of attention's exponentials"}  # kept by fused kernels
PARTS = {name: recompute for recompute, name in rules.MODULES.items()} | {rules.FULL: Recompute.FULL}
DP_TYPES = {
    "": DataParallel.DDP,
    "stage1": DataParallel.ZERO2,  # whole gradients until the step: async_grad_reduce
    "stage2": DataParallel.ZERO2,
    "stage3": DataParallel.ZERO3,
}


class FleetRecipe(NamedTuple):
    """A recipe as it was read."""

    plan: Plan
    model: ModelShape  # MTP layers included if the recipe has any
    notes: tuple[str, ...]
    asked: dict[str, Any]  # search options for the same training: task, lora_rank, offload_optimizer


def read_recipe(content: Mapping[str, Any], model: ModelShape, world_size: int | None = None) -> FleetRecipe:
    """The plan of a recipe for this model, on this number of ranks, by default those that it states. Raises UserError
    with every refusal."""
    return _Reading(content, model, world_size).recipe()


class _Reading:
    """A recipe while it is read. Faults and notes are gathered, so that one error has all faults."""

    def __init__(self, content: Mapping[str, Any], model: ModelShape, world_size: int | None):
        self.read, rest, self.notes, self.faults = fields_of(content)
        self.notes += unread_notes(list(rest))
        read, by_default = self.read, 0 if self.read.stage == "ernie_pretrain" else model.mtp_layers
        self.mtp = by_default if read.num_nextn_predict_layers is None else read.num_nextn_predict_layers
        if self.mtp > model.most_mtp_layers:
            self.faults.append(
                f"{rules.MTP}: is {self.mtp}, but {model.most_mtp_layers} of {model.name} are planned; give fewer"
            )
        if self.mtp and read.separate_mtp_headloss:
            self.faults.append("separate_mtp_headloss: a plan has MTP's head and loss in the last stage; give false")
        if self.mtp and read.recompute_granularity == "full" and read.recompute_method in ("first_n", "block"):
            self.faults.append("recompute_method: copies of PaddleFleet differ in counts with MTP; give uniform")
        self.model = model = model.having(model.main_layers, min(self.mtp, model.most_mtp_layers))
        self.layers = read.num_hidden_layers or model.main_layers
        degrees = (read.tensor_model_parallel_size, read.pipeline_model_parallel_size, read.context_parallel_size)
        self.tp, self.pp, self.cp = (max(degree, 1) for degree in degrees)
        self.ep = max(read.expert_model_parallel_size, 1)
        self.chunks = max(read.virtual_pipeline_model_parallel_size, 1)
        stated = read.sharding_parallel_size
        if world_size is None and stated < 1:
            self.faults.append("world_size: missing, and the recipe has no sharding_parallel_size; give either")
        self.world = world_size or self.tp * self.pp * max(stated, self.ep // self.tp, 1)
        self.size = self.world // (self.tp * self.pp)  # ranks with the same weights
        self.sharding = 1 if not read.sharding else stated if stated > 0 else self.size

    def recipe(self) -> FleetRecipe:
        read = self.read
        self.faults += [*self._wrong_degrees(), *self._wrong_batch()]
        stages, recomputes = self._stages(), self._recomputes()
        away = self._offloaded(recomputes)
        if self.faults:
            raise UserError(self.faults)
        dp_type = DataParallel.DDP if self.sharding == 1 else DP_TYPES[read.sharding]
        sharding = None if dp_type is DataParallel.DDP else self.sharding
        layer = LayerStrategy(self.tp, dp_type=dp_type, context=self.cp, sharding=sharding)
        plan = Plan(
            world_size=self.world,
            global_batch=self._micro * self._micro_batches,
            micro_batches=self._micro_batches,
            stages=tuple(stages),
            layers=tuple(
                replace(
                    layer, recompute=recompute, ep=self.ep if self._has_experts(at) else 1, offload=100 * (at in away)
                )
                for at, recompute in enumerate(recomputes)
            ),
            vocab=VocabStrategy(self.tp, dp_type=dp_type, sharding=sharding, context=self.cp),
            chunks=self.chunks,
            default_dp_type=DataParallel.ZERO2 if dp_type is DataParallel.ZERO3 else dp_type,
            assumed=Assumptions(
                sequence_parallel=read.sequence_parallel and self.tp > 1,
                mixed_precision=read.precision,
                async_grad_reduce=read.sharding != "stage2" or self._micro_batches == 1,
                seq_length=read.max_seq_len,
                fp32_gradients=read.amp_master_grad and read.precision.mixed,
                flash_attention=read.attn_implementation != "eager",
                offload_optimizer=read.tensorwise_offload_optimizer or None,
            ),
        )
        plan = sharded_over_all(plan)
        if faults := find_faults(plan, self.model):
            raise UserError(faults)
        return FleetRecipe(plan, self.model, (*self.notes, *self._remarks(plan)), read.asked)

    @cached_property
    def _micro(self) -> int:
        """Samples of a micro-batch."""
        return self.read.per_device_train_batch_size * (self.size // self.cp)

    @cached_property
    def _micro_batches(self) -> int:
        """The stated number, or that of the global batch."""
        batch, stated = self.read.global_batch_size, "gradient_accumulation_steps" in self.read.model_fields_set
        return batch // self._micro if batch and self._micro and not stated else self.read.gradient_accumulation_steps

    def _has_experts(self, layer: int) -> bool:
        return layer < self.model.layers and self.model.of(layer).experts > 0

    def _wrong_degrees(self) -> Iterator[str]:
        """PaddleFleet's conditions."""
        world, tp, pp, cp, ep, sharding = self.world, self.tp, self.pp, self.cp, self.ep, self.sharding
        if world % (tp * pp):
            yield f"tensor_model_parallel_size: {tp} x {pp} stages do not divide {world} ranks"
        elif self.size % sharding:
            yield f"sharding_parallel_size: {sharding} does not divide the {self.size} ranks that share weights"
        if sharding % cp:
            yield f"context_parallel_size: {cp} does not divide the {sharding} ranks of sharding"
        if ep > 1 and world % (pp * ep):
            yield f"expert_model_parallel_size: {ep} x {pp} stages do not divide {world} ranks"
        if ep % tp and ep > 1:
            yield f"expert_model_parallel_size: {ep} is no multiple of tensor_model_parallel_size {tp}"
        if ep > 1 and sharding != self.size:
            yield f"sharding_parallel_size: is {sharding}; experts need all {self.size} ranks that share weights"

    def _wrong_batch(self) -> Iterator[str]:
        batch, samples = self.read.global_batch_size, self._micro * self._micro_batches
        if batch not in (None, samples):
            yield f"global_batch_size: is {batch}, but {self._micro_batches} micro-batches have {samples} samples"
        if self.chunks > 1 and (self.pp <= 2 or self._micro_batches % self.pp or self._micro_batches < 2 * self.pp):
            yield (
                f"virtual_pipeline_model_parallel_size: is {self.chunks} with {self.pp} stages and "
                f"{self._micro_batches} micro-batches; the schedule is a plan's in more than 2 stages, with 2, 3, … "
                "times as many micro-batches"
            )

    @cached_property
    def _settings(self) -> dict[str, Any]:
        changed = {"num_hidden_layers": self.layers, rules.MTP: self.mtp, "recompute_modules": self._modules}
        return self.read.model_dump() | changed

    def _stages(self) -> list[int]:
        if self.layers != self.model.main_layers:
            self.faults.append(
                f"num_hidden_layers: is {self.layers}, but {self.model.name} has {self.model.main_layers}; "
                "name a config.json that has as many"
            )
        try:
            stages = [chunk.count("t") + chunk.count("m") for chunk in rules.division(self._settings)]
        except UserError as error:
            self.faults += error.faults
            return []
        if 0 in stages:
            empty = rules.TAIL if stages[0] else rules.HEAD
            self.faults.append(
                f"{empty}: leaves a part of the pipeline without a layer, which no plan states; lower it"
            )
        return stages

    @cached_property
    def _modules(self) -> Any:
        """recompute_modules, or the list of `ernie_pretrain`, whose numbers nobody checks."""
        gate_up, layers = self.read.recompute_fwd_gate_up, self.layers
        if not gate_up:
            return self.read.recompute_modules
        ids = gate_up if isinstance(gate_up, list) else [*range(layers)]
        existing = [at for at in ids if at in range(layers)]
        if len(existing) < len(ids):
            chosen = count(len(existing), "layer") if existing else "no layer"
            self.notes.append(f"recompute_fwd_gate_up: selects {chosen}, of {len(ids)} named; the model has {layers}")
        return {"moe_gate_up": existing}

    def _recomputes(self) -> list[Recompute]:
        """The recompute of each layer."""
        recomputes = [Recompute.NONE] * (self.layers + self.mtp)
        try:
            chosen = rules.selected(self._settings)
        except UserError as error:
            self.faults += error.faults
            return recomputes
        self.notes += self._surprises()
        for module, ids in sorted(chosen.items()):  # mlp before moe_gate_up, which it includes
            if not (recompute := PARTS.get(module)):
                self._judge(module, ids)
                continue
            layers = set(ids)
            if recompute is Recompute.GATE_UP:
                layers = {at for at in ids if self._has_experts(at) and not recomputes[at]}
            for at in layers:
                recomputes[at] = recompute
            if ids and not layers:
                self.notes.append(f"recompute_modules.{module}: has no effect in any layer")
        return recomputes

    def _offloaded(self, recomputes: Sequence[Recompute]) -> set[int]:
        """Layers whose input is in host memory."""
        rule = self.read.decoderlayer_act_offload_settings
        try:
            layers = set(rules.offloaded(self._settings, rule)) if rule else set()
        except UserError as error:
            self.faults += error.faults
            return set()
        away = {at for at in layers if recomputes[at] is Recompute.FULL}
        if rule and layers != away:
            self.notes.append(
                f"{rules.OFFLOAD}: has no effect in layers that do not recompute all, {len(layers - away)} here"
            )
        return away

    def _surprises(self) -> Iterator[str]:
        """Notes on settings whose effect differs from their name."""
        read, modules = self.read, self.read.recompute_modules or {}
        values = [*modules.values()] if isinstance(modules, dict) else [read.recompute_num_layers] * bool(modules)
        lists = [name for name in modules if name not in (*rules.OF_THE_MODEL, *rules.REFINED)]
        counted = type(read.recompute_num_layers) is int or any(type(value) is int for value in values)
        if lists and read.recompute_granularity != "selective":
            yield f"recompute_modules: {', '.join(lists)} has no effect, as recompute_granularity is not selective"
        if read.recompute_granularity == "full" and read.recompute_method is None:
            yield "recompute_granularity: full without a recompute_method recomputes nothing"
        if [] in values:
            yield "recompute_modules: has a list that selects no layer"
        if read.recompute_method == "first_n" and self.chunks > 1 and counted:
            yield "recompute_method: first_n loses layers of stages with chunks; list layers, or use block"
        if read.recompute_method in ("first_n", "block") and read.num_empty_layers_add_in_head and counted:
            yield f"{rules.HEAD}: a count of layers that recompute includes the empty ones in front"

    def _judge(self, module: str, ids: frozenset[int]) -> None:
        """Checks a module outside a plan's layers."""
        field = f"recompute_modules.{module}"
        if module == "lm_head":
            self.notes.append(f"{field}: PaddleFleet does not recompute it")
        elif module == "loss_fn":
            self.notes.append(f"{field}: is recomputed; neither the plan nor its prices have it")
        elif module in FREED and self.read.attn_implementation != "eager":
            self.notes.append(f"{field}: frees {FREED[module]} alone where kernels are fused; the plan keeps all")
        elif ids and module in (*UNSTATED, *FREED, *rules.REFINED):
            self.faults.append(
                f"{field}: no plan states it; leave it out, or recompute {' or '.join(rules.MODULES.values())}"
            )
        elif ids:
            near = get_close_matches(module, [*PARTS, *FREED, *UNSTATED, *rules.REFINED, *rules.OF_THE_MODEL], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.notes.append(f"{field}: PaddleFleet has no such module, recomputes nothing and says nothing{hint}")

    def _remarks(self, plan: Plan) -> Iterator[str]:
        """Differences between the recipe and its plan."""
        if self.ep > 1 and not self.model.experts:
            yield f"expert_model_parallel_size: {self.ep} has no effect, as {self.model.name} has no experts"
        is_default = self.read.hybrid_parallel_topo_order != "pp_first"
        if is_default and self.pp > 1 and self.size > max(1, self.ep // self.tp):
            yield (
                "hybrid_parallel_topo_order: sharding_first, the default, has neighbouring ranks in the stages of a "
                "pipeline; the plan has them in one stage, as pp_first"
            )
        if self.model.most_mtp_layers and self.read.num_nextn_predict_layers is None:
            yield f"{rules.MTP}: is missing, read as {self.mtp}; the config.json that PaddleFleet reads may differ"
        if self.mtp:
            yield f"mtp_loss_scaling_factor: {self.read.mtp_loss_scaling_factor:g} is no part of a plan; train with it"
        if self.mtp and self.pp > 1 and not self.read.enable_mtp_magic_send:
            yield "enable_mtp_magic_send: is off; in the plan the last stage looks tokens up itself, as if it were on"
        if self.read.sharding == "stage1" and self._micro_batches == 1 and self.sharding > 1:
            yield "sharding: stage1 keeps whole gradients until the step; of one micro-batch the plan shards them"
        if self.read.device != "gpu":
            yield f"device: {self.read.device} has no data sheet, so that the plan has no prices"
