"""Reading a GGUF model: geometry, matrices as exact integer codes, norm vectors."""

from .geometry import Geometry, RopeScaling, rope_table
from .reader import Model, ModelError, load_model
from .repack import Matrix

__all__ = ["Geometry", "Matrix", "Model", "ModelError", "RopeScaling", "load_model", "rope_table"]
