"""What the layers of a model need installed beside a framework."""

from __future__ import annotations

from meshwright.frameworks.record import Framework, Setting
from meshwright.model_specs.schema import ModelSpec


def layer_needs(framework: Framework, model: ModelSpec) -> dict[str, str]:
    """Packages by the kind of layer that needs them; of kinds that the framework has.

    >>> from meshwright.frameworks.catalog import framework_named
    >>> from meshwright.model_specs.catalog import load_catalog_model
    >>> layer_needs(framework_named("fsdp2"), load_catalog_model("mamba2-2.7b"))
    {'Mamba-2': 'mamba-ssm and causal-conv1d'}
    """
    kinds: dict[str, Setting | None] = {}
    if model.linear_attention is not None:
        kinds["linear attention"] = framework.linear_attention
    if model.indexer is not None:
        kinds["sparse attention"] = framework.sparse_attention
    if model.state_space is not None:
        kinds[model.state_space.title] = framework.hybrid_layers
    settings = {kind: setting for kind, setting in kinds.items() if setting is not None}
    return {kind: setting.installs for kind, setting in settings.items() if setting.installs}
