"""The tensors of a PyTorch module by name: parameters, buffers, and plain tensors that are attributes.

Some layers keep what they computed of their weights as a plain attribute, so these count too; as `path::attribute`.
A tensor that hides elsewhere (in a list, in a closure) is not seen.
"""


def is_module(target):
    """Whether it is a module, of whatever version."""
    return hasattr(target, "named_parameters") and hasattr(target, "named_modules")


def tensors(module):
    """Every tensor of a module, by name. A tensor under two names is there twice."""
    found = {}
    for path, _, name, tensor in _holders(module):
        found[path] = tensor
    return found


def attach(module, views):
    """Puts views in place of a module's tensors of the same names."""
    import torch

    for path, holder, name, tensor in list(_holders(module)):
        view = views[path]
        if isinstance(tensor, torch.nn.Parameter):
            if tensor.is_meta:
                holder._parameters[name] = torch.nn.Parameter(view, requires_grad=False)
            else:
                # The object stays: optimisers, ties and attributes that weight loaders set refer to it.
                tensor.requires_grad_(False)
                tensor.data = view
        elif name in holder._buffers:
            holder._buffers[name] = view
        else:
            setattr(holder, name, view)


def _holders(module):
    import torch

    for prefix, holder in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in holder._parameters.items():
            if tensor is not None:
                yield f"{dot}{name}", holder, name, tensor
        for name, tensor in holder._buffers.items():
            if tensor is not None:
                yield f"{dot}{name}", holder, name, tensor
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor) and value.numel() > 0:
                yield f"{prefix}::{name}", holder, name, value
