"""The tensors of a PyTorch module by name: parameters, buffers, and plain tensors that are attributes.

Some layers keep what they computed of their weights as a plain attribute, so these count too; as `path::attribute`.
A tensor that hides elsewhere (in a list, in a closure) is not seen.
"""

import types

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"


class Hidden(Exception):
    """A module was made without memory, and holds a tensor without memory where none is looked for."""


def is_module(target):
    """Whether it is a module, of whatever version."""
    return hasattr(target, "named_parameters") and hasattr(target, "named_modules")


def tensors(module):
    """Every tensor of a module, by name. A tensor under two names is there twice."""
    found = {}
    for path, _, name, tensor in _holders(module):
        found[path] = tensor
    return found


def kinds(module):
    """What each tensor is to its module, by name."""
    found = {}
    for path, holder, name, _ in _holders(module):
        found[path] = PARAMETER if name in holder._parameters else BUFFER if name in holder._buffers else ATTRIBUTE
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


def place(module, tensors, kinds):
    """Makes tensors what a module has under their names, whatever it had there. What is one tensor is one parameter."""
    holders, made = dict(module.named_modules(remove_duplicate=False)), {}
    for path, tensor in tensors.items():
        kind = kinds[path]
        prefix, _, name = path.rpartition("::" if kind == ATTRIBUTE else ".")
        holder = holders[prefix]
        old = holder._parameters.get(name)
        if kind == PARAMETER and old is not None and not old.is_meta:
            # The object stays: what a module made of its parameters may refer to it.
            old.data = tensor
            continue
        for names in (holder._parameters, holder._buffers, vars(holder)):
            names.pop(name, None)
        if kind == PARAMETER:
            holder._parameters[name] = made.setdefault(id(tensor), _parameter(tensor, old))
        elif kind == BUFFER:
            holder._buffers[name] = tensor
        else:
            setattr(holder, name, tensor)


def _parameter(tensor, old):
    """A parameter of the old one's class, with what was said of it."""
    import torch

    made = torch.Tensor._make_subclass(torch.nn.Parameter if old is None else type(old), tensor, False)
    vars(made).update({} if old is None else vars(old))
    return made


def drop_meta(module):
    """Takes tensors without memory out of a module. Hidden where one is left in an object that a module refers to."""
    for _, holder, name, tensor in list(_holders(module)):
        if tensor.is_meta:
            for names in (holder._parameters, holder._buffers, vars(holder)):
                names.pop(name, None)
    seen = set()
    for path, holder in module.named_modules():
        for name, value in vars(holder).items():
            if _has_meta(value, seen):
                raise Hidden(f"{path}: {name} ({type(value).__name__}) holds a tensor without memory")


def _has_meta(value, seen):
    """Whether a tensor without memory is reached from there, but through modules. An empty one is a place for one to come."""
    import torch

    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, torch.Tensor):
            if part.is_meta and part.numel() > 0:
                return True
        elif id(part) not in seen and not isinstance(part, (torch.nn.Module, type, types.ModuleType)):
            seen.add(id(part))
            if isinstance(part, (list, tuple)):
                stack.extend(part)
            else:
                stack.extend((part if isinstance(part, dict) else getattr(part, "__dict__", {})).values())
    return False


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
