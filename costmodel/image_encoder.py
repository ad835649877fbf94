"""What an image encoder in front of the language model takes of the first rank: its work, parameters, bytes.

Its layers are those of a transformer whose tokens are patches, and are priced as such; nothing in them is
causal. It runs in 16 bits, once for every micro-batch, on the pipeline rank with the token table.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.costmodel.activations import saved_activations
from meshwright.costmodel.execution_names import PRETRAINING
from meshwright.costmodel.kernels import OPERAND_BYTES
from meshwright.costmodel.layer_context import Context
from meshwright.costmodel.layout import Floats, Layout, Recompute
from meshwright.costmodel.rates import kernel_rates
from meshwright.costmodel.workload import Workload
from meshwright.model_specs.blocks import EncoderUse, VisionSpec
from meshwright.model_specs.parameters import encoder_layers

_MERGER_BYTES = 8.0
"""Of an element that the projector of a token reads: its input before and after the norm, what its first
product returns and what the activation function makes of it, 16 bits each."""


def encoder_of(workload: Workload) -> tuple[VisionSpec, EncoderUse] | None:
    """The image encoder that a workload runs, and what the run makes of it.

    Parameters
    ----------
    workload : Workload
        Its model.

    Returns
    -------
    tuple or None
        None where text alone is trained on.
    """
    vision = workload.model.encoder
    if vision is None or vision.use is None:
        return None
    return vision, vision.use


def patches_of_image(vision: VisionSpec, use: EncoderUse) -> int:
    """Patches of one image, all images being alike.

    Parameters
    ----------
    vision : VisionSpec
        Patches of a token.
    use : EncoderUse
        Tokens and images of a sequence.

    Returns
    -------
    int
        At least 1.
    """
    return use.tokens // use.images * vision.patches_per_token


def encoder_workload(workload: Workload, vision: VisionSpec, use: EncoderUse) -> Workload:
    """The encoder's layers as a workload of their own, whose sequences are the patches of an image.

    Parameters
    ----------
    workload : Workload
        Of the whole model.
    vision, use : VisionSpec, EncoderUse
        From `encoder_of`.

    Returns
    -------
    Workload
        In 16 bits, all weights trained; without what is chosen for the layers of the language model alone.
    """
    narrow = workload.precision in OPERAND_BYTES
    return replace(
        workload,
        model=encoder_layers(vision),
        seq_len=patches_of_image(vision, use),
        precision="bf16" if narrow else workload.precision,
        fp8_recipe=None,
        fp8_attention=False,
        adapters=None,
        lengths=None,
        loss=None,
        kind=PRETRAINING,
        reference=None,
        tp_overlap=False,
        ep_overlap=False,
        offload_modules="none",
        cuda_graph="none",
        keeps_gathered_inputs=False,
    )


def encoder_layout(workload: Workload, layout: Layout, use: EncoderUse) -> Layout:
    """The layout in which a rank runs the encoder: a micro-batch of images, whole on each context rank.

    Parameters
    ----------
    workload : Workload
        Of the whole model; its kind says how many sequences a sample has.
    layout : Layout
        One layout, or many of shape [n].
    use : EncoderUse
        From `encoder_of`.

    Returns
    -------
    Layout
        Of the same shape.
    """
    tp, micro_batch = np.asarray(layout.tp), np.asarray(layout.micro_batch)
    recomputed = np.asarray(layout.recompute) & int(Recompute.FULL) if use.recomputed else 0 * tp
    return replace(
        layout,
        tp=tp if use.tensor_parallel else np.ones_like(tp),
        cp=np.ones_like(np.asarray(layout.cp)),
        micro_batch=micro_batch * workload.step_kind.sequences * use.images,
        sequence_parallel=np.zeros_like(tp, dtype=bool),
        recompute=recomputed,
    )


def encoder_context(c: Context, vision: VisionSpec, use: EncoderUse) -> Context:
    """What the operators of the encoder's layers need to know.

    Parameters
    ----------
    c : Context
        Of the whole model.
    vision, use : VisionSpec, EncoderUse
        From `encoder_of`.

    Returns
    -------
    Context
        Forward only where the encoder is frozen: pixels need no gradient either.
    """
    workload = encoder_workload(c.workload, vision, use)
    alone = np.ones_like(c.placement.cp)
    placement = replace(c.placement, cp=alone)
    if not use.tensor_parallel:
        placement = replace(placement, tp=alone)
    return replace(
        c,
        workload=workload,
        layout=encoder_layout(c.workload, c.layout, use),
        placement=placement,
        rates=kernel_rates(workload, c.constants),
        forward_only=c.forward_only or not use.trained,
    )


def score_share(vision: VisionSpec, use: EncoderUse) -> float:
    """Score area of the mean layer over that of causal attention to one image: 2 where all attend in full.

    In windows of w by w patches a query sees w^2 of the image's (Qwen2.5-VL technical report, arXiv
    2502.13923, section 2.1.1).

    Parameters
    ----------
    vision, use : VisionSpec, EncoderUse
        From `encoder_of`.

    Returns
    -------
    float
        Above 0, at most 2.
    """
    if vision.window is None:
        return 2.0
    seen = min(vision.window**2 / patches_of_image(vision, use), 1.0)
    full = vision.full_layers / vision.layers
    return 2.0 * (full + (1.0 - full) * seen)


def projections(vision: VisionSpec, use: EncoderUse) -> list[tuple[float, int, int]]:
    """Matrix products around the layers: rows of a sequence, outputs and inputs.

    Patches come in; the projector hands tokens over (model_specs/parameters.py names the files).

    Parameters
    ----------
    vision, use : VisionSpec, EncoderUse
        From `encoder_of`.

    Returns
    -------
    list of tuples
        Each above 0.
    """
    tokens = float(use.tokens)
    products = [(tokens * vision.patches_per_token, vision.hidden, vision.patch_width)]
    for _ in range(1 + vision.deepstack):
        if vision.merger_products == 2:
            products.append((tokens, vision.merged, vision.merged))
        products.append((tokens, vision.out_hidden, vision.merged))
    return products


def encoder_saved_bytes(workload: Workload, layout: Layout) -> Floats:
    """Activations of the encoder that autograd keeps for one micro-batch on one GPU of the first rank.

    Layers as `activations.activation_bytes_per_layer` counts them, and the projector.

    Parameters
    ----------
    workload : Workload
        Of the whole model.
    layout : Layout
        One layout, or many of shape [n].

    Returns
    -------
    float or array
        Bytes, at least 0; 0 without an encoder that is trained.
    """
    found = encoder_of(workload)
    if found is None or not found[1].trained:
        return 0.0
    vision, use = found
    own = encoder_layout(workload, layout, use)
    kept, dropped = saved_activations(encoder_workload(workload, vision, use), own).dense
    images = np.asarray(own.micro_batch, dtype=np.float64) / use.images
    merged = _MERGER_BYTES * (1 + vision.deepstack) * use.tokens * vision.merged * images
    saved: Floats = vision.layers * np.where(own.recomputes_layers, dropped, kept) + merged
    return saved
