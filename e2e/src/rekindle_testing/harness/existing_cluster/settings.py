"""The settings of an existing cluster, from environment variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle_testing.harness.cluster_programs import ClusterNotUsable, checked_image


@dataclass(frozen=True, slots=True)
class ExistingClusterSettings:
    """`kubeconfig` as in the variable KUBECONFIG. `fs_group`: of all pods that use the volume."""

    kubeconfig: str
    operator_image: str
    pipelines_image: str
    storage_class: str
    fs_group: int | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ExistingClusterSettings:
        if environment.get("NODES") != "existing":
            raise ClusterNotUsable("an existing cluster is used only with NODES=existing")
        needed = ("KUBECONFIG", "OPERATOR_IMAGE", "PIPELINES_IMAGE", "STORAGE_CLASS")
        if missing := [name for name in needed if not environment.get(name)]:
            raise ClusterNotUsable(
                f"NODES=existing needs {', '.join(missing)}: see docs/existing-clusters.md"
            )
        group = environment.get("FS_GROUP", "")
        if group and not group.isdecimal():
            raise ClusterNotUsable(
                f"FS_GROUP={group} is not the number of a group: write it like 10001"
            )
        return cls(
            kubeconfig=environment["KUBECONFIG"],
            operator_image=checked_image(environment, "OPERATOR_IMAGE"),
            pipelines_image=checked_image(environment, "PIPELINES_IMAGE"),
            storage_class=environment["STORAGE_CLASS"],
            fs_group=int(group) if group else None,
        )
