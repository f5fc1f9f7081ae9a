"""/admin/v1/plan: a plan of capacity."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from gateway.admin.access import OperatorContext, RequireOperator
from gateway.admin.planning import service
from gateway.admin.planning.question import PlanOptions
from gateway.serving.api.dependencies import SettingsDep

router = APIRouter(prefix="/admin/v1/plan", tags=["operation"])
ReadAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "read"))]
_Degree = Annotated[int, Query(ge=0, le=64, description="0: what costs least.")]
_Tokens = Annotated[float, Query(ge=0, le=1e9)]
_Word = Annotated[str, Query(max_length=200)]
_Time = Annotated[str, Query(max_length=40, description="Such as 300ms; 0: no objective.")]


def _options(
    *,
    model: Annotated[str, Query(max_length=200, description="Published, or the served one.")] = (
        "llama-3.1-8b"
    ),
    gpu: Annotated[str, Query(max_length=200, description="Separated by commas.")] = "h100",
    count: Annotated[int, Query(ge=0, le=4096, description="0: as many as it takes.")] = 0,
    tp: _Degree = 0,
    pp: _Degree = 0,
    dp: _Degree = 0,
    ep: Annotated[int, Query(ge=0, le=1024)] = 0,
    quantization: _Word = "",
    kv_dtype: _Word = "",
    rate: Annotated[float, Query(gt=0, le=1e9, allow_inf_nan=False)] = 20.0,
    prompt: _Tokens = 1000.0,
    output: _Tokens = 300.0,
    shared_prefix: _Tokens = 0.0,
    adapters: Annotated[int, Query(ge=0, le=100_000)] = 0,
    adapter_rank: Annotated[int, Query(ge=1, le=1024)] = 16,
    ttft: _Time = "300ms",
    tpot: _Time = "40ms",
    server: Annotated[str, Query(max_length=40, description="vllm, sglang or trtllm.")] = "",
    gpu_price: Annotated[float, Query(ge=0, le=1e6, description="Dollars an hour.")] = 0.0,
    acceptance: Annotated[float, Query(ge=0, lt=1)] = 0.0,
    guesses: Annotated[int, Query(ge=0, le=64)] = 0,
) -> PlanOptions:
    """The options of `tollhouse plan`."""
    return PlanOptions(
        model=model, gpu=gpu, count=count, tp=tp, pp=pp, dp=dp, ep=ep, quantization=quantization,
        kv_dtype=kv_dtype, rate=rate, prompt=prompt, output=output, shared_prefix=shared_prefix,
        adapters=adapters, adapter_rank=adapter_rank, ttft=ttft, tpot=tpot, server=server,
        gpu_price=gpu_price, acceptance=acceptance, guesses=guesses,
    )  # fmt: skip


@router.get("")
async def plan(
    ctx: ReadAccess, settings: SettingsDep, options: Annotated[PlanOptions, Depends(_options)]
) -> dict[str, Any]:
    """What fits, how fast it is, what binds, how many devices it takes and what a million tokens
    costs."""
    return await asyncio.to_thread(service.plan, options, settings, ctx.database, ctx.clock)
