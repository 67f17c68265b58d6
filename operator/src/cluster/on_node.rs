//! Turns what a node says of pods into those of them that are on it.
//!
//! Who has one node writes its `GpuNode` at will: what stands there decides about pods of that node
//! and no others.

use std::ops::Deref;

/// A pod, as far as it is known where it is.
pub trait Placed {
    /// The node that it is on.
    fn node(&self) -> Option<&str>;
}

impl<P: Placed> Placed for &P {
    fn node(&self) -> Option<&str> {
        (*self).node()
    }
}

/// A pod on the node that speaks of it. [`there`] alone makes it.
#[derive(Clone, Debug, PartialEq)]
pub struct OnNode<P>(P);

/// `pod`, where it is on the `node` that speaks of it.
pub fn on_node<P: Placed>(node: &str, pod: P) -> Option<OnNode<P>> {
    (pod.node() == Some(node)).then_some(OnNode(pod))
}

impl<P: Clone> OnNode<&P> {
    /// The same pod, owned.
    pub fn cloned(self) -> OnNode<P> {
        OnNode(self.0.clone())
    }
}

impl<P> Deref for OnNode<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.0
    }
}
