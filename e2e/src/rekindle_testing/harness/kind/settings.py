"""The settings of a kind cluster, from environment variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle_testing.harness.cluster_programs import ClusterNotUsable, checked_image


@dataclass(frozen=True, slots=True)
class Settings:
    """`images`: of the operator and of the pipelines; None: those of this checkout. `node_image`:
    of kind's nodes, which decides the version of Kubernetes; None: kind's default."""

    images: tuple[str, str] | None = None
    node_image: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        if environment.get("NODES") != "kind":
            raise ClusterNotUsable("a kind cluster is made only with NODES=kind")
        given = [n for n in ("OPERATOR_IMAGE", "PIPELINES_IMAGE") if environment.get(n)]
        if len(given) == 1:
            raise ClusterNotUsable(
                f"{given[0]} alone: set OPERATOR_IMAGE and PIPELINES_IMAGE, or neither"
            )
        images = None
        if given:
            operator, pipelines = (checked_image(environment, name) for name in given)
            images = (operator, pipelines)
        return cls(images, environment.get("KIND_NODE_IMAGE") or None)
