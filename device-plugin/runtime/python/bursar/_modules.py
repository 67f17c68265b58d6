"""Reads and replaces the tensors of a PyTorch module by name: parameters, buffers, and plain attributes.

Some layers store tensors that they derive from their weights as plain attributes, which are named `path::attribute`.
Tensors elsewhere, such as in a list or a closure, are not found.
"""

import types

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"


class Hidden(Exception):
    """A module that was created without memory has such a tensor where this package does not look."""


def is_module(target):
    """Returns whether an object is a module, of any version of PyTorch."""
    return hasattr(target, "named_parameters") and hasattr(target, "named_modules")


def tensors(module):
    """Returns every tensor of a module by name. A tensor with two names occurs twice."""
    found = {}
    for path, _, name, tensor in _holders(module):
        found[path] = tensor
    return found


def kinds(module):
    """Returns the kind of each tensor by name."""
    found = {}
    for path, holder, name, _ in _holders(module):
        found[path] = PARAMETER if name in holder._parameters else BUFFER if name in holder._buffers else ATTRIBUTE
    return found


def attach(module, views):
    """Replaces a module's tensors by the views of the same names."""
    import torch

    for path, holder, name, tensor in list(_holders(module)):
        view = views[path]
        if isinstance(tensor, torch.nn.Parameter):
            if tensor.is_meta:
                holder._parameters[name] = torch.nn.Parameter(view, requires_grad=False)
            else:
                # Keeps the object, because optimisers, ties and attributes of weight loaders refer to it.
                tensor.requires_grad_(False)
                tensor.data = view
        elif name in holder._buffers:
            holder._buffers[name] = view
        else:
            setattr(holder, name, view)


def place(module, tensors, kinds):
    """Sets a module's tensors by name, whatever it had there. One tensor becomes one parameter."""
    holders, made = dict(module.named_modules(remove_duplicate=False)), {}
    for path, tensor in tensors.items():
        kind = kinds[path]
        prefix, _, name = path.rpartition("::" if kind == ATTRIBUTE else ".")
        holder = holders[prefix]
        old = holder._parameters.get(name)
        if kind == PARAMETER and old is not None and not old.is_meta:
            # Keeps the object, because derived parts of the module may refer to it.
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
    """Returns a parameter with the class and attributes of the old one."""
    import torch

    made = torch.Tensor._make_subclass(torch.nn.Parameter if old is None else type(old), tensor, False)
    vars(made).update({} if old is None else vars(old))
    return made


def drop_meta(module):
    """Removes tensors without memory from a module. Raises Hidden if another object of the module has one."""
    for _, holder, name, tensor in list(_holders(module)):
        if tensor.is_meta:
            for names in (holder._parameters, holder._buffers, vars(holder)):
                names.pop(name, None)
    seen = set()
    for path, holder in module.named_modules():
        for name, value in vars(holder).items():
            if _has_meta(value, seen):
                kind = type(value).__name__
                raise Hidden(f"failed to clear {path}: {name} ({kind}) has a tensor without memory; load without bursar")


def _has_meta(value, seen):
    """Returns whether an object reaches a tensor without memory, other than through modules. Empty tensors are placeholders."""
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
