//! Accepts a node's report on a pod only when that pod is on the node.
//!
//! An attacker with root on one node can write its `GpuNode` at will. Its content may decide about
//! pods of that node only.

use std::ops::Deref;

/// An object that may be on a node: a pod.
pub trait Placed {
    /// The pod's node.
    fn node(&self) -> Option<&str>;
}

impl<P: Deref<Target: Placed>> Placed for P {
    fn node(&self) -> Option<&str> {
        (**self).node()
    }
}

/// A pod on the node that reports it. Only [`on_node`] constructs it.
#[derive(Clone, Debug, PartialEq)]
pub struct OnNode<P>(P);

/// Returns `pod` if it is on the `node` that reports it.
pub fn on_node<P: Placed>(node: &str, pod: P) -> Option<OnNode<P>> {
    (pod.node() == Some(node)).then_some(OnNode(pod))
}

impl<P> Deref for OnNode<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.0
    }
}
