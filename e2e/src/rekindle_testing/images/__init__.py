"""`make images`: builds the images of the operator and the pipelines, and starts each of them.

`engines` knows the command lines of docker, podman and buildah, `base` the base image, `image_runs`
what a started image must say; `image_checks` runs in one, `enter` makes a container of it where
the engine is buildah, which only builds.
"""
