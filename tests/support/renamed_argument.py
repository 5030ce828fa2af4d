"""A pytest plugin: a release of transformers that calls attention's ``scaling`` ``scale``, as none has done yet."""

from transformers.models.llama import modeling_llama

given = modeling_llama.ALL_ATTENTION_FUNCTIONS


class Renamed:
    """Hands out what stands in the registry, called by another keyword."""

    def get_interface(self, name, default):
        """As transformers' registry."""
        attention = given.get_interface(name, default)

        def call(*tensors, scaling, **others):
            return attention(*tensors, scale=scaling, **others)

        return call


modeling_llama.ALL_ATTENTION_FUNCTIONS = Renamed()
