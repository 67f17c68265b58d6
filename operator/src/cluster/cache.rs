//! Caches the objects of one kind, reduced to the fields that the operator uses.

use kube::ResourceExt;
use kube::runtime::watcher::Event;
use rpds::RedBlackTreeMapSync;

/// The name of an object. The namespace is empty for cluster-scoped kinds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The object's namespace.
    pub namespace: String,
    /// The object's name.
    pub name: String,
}

impl Key {
    /// The key of a cluster-scoped object.
    pub fn cluster_scoped(name: &str) -> Self {
        Self {
            namespace: String::new(),
            name: name.to_owned(),
        }
    }

    /// The key of `object`.
    pub fn of(object: &impl ResourceExt) -> Self {
        Self {
            namespace: object.namespace().unwrap_or_default(),
            name: object.name_any(),
        }
    }
}

/// The key of an object and its projection. `None` when the operator has no use for the object.
pub type CacheEntry<V> = (Key, Option<V>);

/// Maps each object of `event` to its projection.
pub fn project<K: ResourceExt, V>(
    event: &Event<K>,
    slim: impl Fn(&K) -> Option<V>,
) -> Event<CacheEntry<V>> {
    let entry = |object: &K| (Key::of(object), slim(object));
    match event {
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(entry(object)),
        Event::InitDone => Event::InitDone,
        Event::Apply(object) => Event::Apply(entry(object)),
        Event::Delete(object) => Event::Delete(entry(object)),
    }
}

/// Objects by key. A copy shares all of them, so that a planner can read one while watches go on.
pub(super) type Objects<V> = RedBlackTreeMapSync<Key, V>;

/// The objects of one kind. The old list counts until a new list is complete.
#[derive(Debug)]
pub struct Cache<V> {
    objects: Objects<V>,
    incoming: Objects<V>,
    listed: bool,
}

impl<V> Default for Cache<V> {
    fn default() -> Self {
        Self {
            objects: Objects::new_sync(),
            incoming: Objects::new_sync(),
            listed: false,
        }
    }
}

impl<V: Clone + PartialEq> Cache<V> {
    /// Applies one event. Returns each changed key with its former value.
    pub fn apply(&mut self, event: Event<CacheEntry<V>>) -> Vec<CacheEntry<V>> {
        match event {
            Event::Init => self.incoming = Objects::new_sync(),
            Event::InitApply((key, Some(value))) => self.incoming.insert_mut(key, value),
            Event::InitApply((_, None)) => {}
            Event::InitDone => return self.replace(),
            Event::Apply((key, value)) => return self.set(key, value),
            Event::Delete((key, _)) => return self.set(key, None),
        }
        Vec::new()
    }

    fn replace(&mut self) -> Vec<CacheEntry<V>> {
        let incoming = std::mem::replace(&mut self.incoming, Objects::new_sync());
        let before = std::mem::replace(&mut self.objects, incoming);
        self.listed = true;
        let mut changed = Vec::new();
        for (key, value) in self.objects.iter() {
            let was = before.get(key);
            if was != Some(value) {
                changed.push((key.clone(), was.cloned()));
            }
        }
        let gone = before
            .iter()
            .filter(|(key, _)| !self.objects.contains_key(*key));
        changed.extend(gone.map(|(key, was)| (key.clone(), Some(was.clone()))));
        changed
    }

    fn set(&mut self, key: Key, value: Option<V>) -> Vec<CacheEntry<V>> {
        let was = self.objects.get(&key);
        if was == value.as_ref() {
            return Vec::new();
        }
        let was = was.cloned();
        match value {
            Some(value) => self.objects.insert_mut(key.clone(), value),
            None => drop(self.objects.remove_mut(&key)),
        }
        vec![(key, was)]
    }

    /// Whether one list has been complete.
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// The objects as they are now.
    pub(super) fn objects(&self) -> Objects<V> {
        self.objects.clone()
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &V)> {
        self.objects.iter()
    }

    /// The object with this key.
    pub fn get(&self, key: &Key) -> Option<&V> {
        self.objects.get(key)
    }

    /// The objects of one namespace.
    pub fn in_namespace<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a V)> {
        let first = Key {
            namespace: namespace.to_owned(),
            name: String::new(),
        };
        self.objects
            .range(first..)
            .take_while(move |(key, _)| key.namespace == namespace)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    fn key(namespace: &str, name: &str) -> Key {
        Key {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    fn entry(name: &str, value: u8) -> CacheEntry<u8> {
        (key("n", name), Some(value))
    }

    #[test]
    fn cache_returns_only_changed_objects() {
        let mut mirror = Cache::default();
        let (apply, change) = (
            |value| Event::Apply(entry("a", value)),
            |was| [(key("n", "a"), was)],
        );
        assert_eq!(mirror.apply(apply(1)), change(None));
        assert_eq!(mirror.apply(apply(1)), []);
        assert_eq!(mirror.apply(apply(2)), change(Some(1)));
        assert_eq!(mirror.apply(Event::Delete(entry("a", 1))), change(Some(2)));
        assert_eq!(mirror.apply(Event::Delete(entry("a", 1))), []);
    }

    #[test]
    fn object_is_dropped_when_its_projection_is_none() {
        let mut mirror = Cache::default();
        mirror.apply(Event::Apply(entry("a", 1)));
        assert_eq!(
            mirror.apply(Event::Apply((key("n", "a"), None))),
            [entry("a", 1)]
        );
        assert_eq!(mirror.iter().count(), 0);
    }

    #[test]
    fn old_list_counts_until_the_new_one_is_complete() {
        let mut mirror = Cache::default();
        mirror.apply(Event::Apply(entry("old", 1)));
        mirror.apply(Event::Init);
        mirror.apply(Event::InitApply(entry("new", 1)));
        assert_eq!(mirror.get(&key("n", "old")), Some(&1));
        assert!(!mirror.is_listed());
        assert_eq!(
            mirror.apply(Event::InitDone),
            [(key("n", "new"), None), entry("old", 1)]
        );
        assert!(mirror.is_listed());
        assert_eq!(mirror.get(&key("n", "old")), None);
    }

    #[test]
    fn interrupted_list_leaves_nothing_behind() {
        let mut mirror = Cache::default();
        mirror.apply(Event::Init);
        mirror.apply(Event::InitApply(entry("gone", 1)));
        mirror.apply(Event::Init);
        mirror.apply(Event::InitDone);
        assert_eq!(mirror.iter().count(), 0);
    }

    #[test]
    fn namespace_range_excludes_its_neighbours() {
        let mut mirror = Cache::default();
        for (namespace, name) in [("a", "z"), ("ab", "a"), ("ab", "b"), ("b", "a")] {
            mirror.apply(Event::Apply((key(namespace, name), Some(1))));
        }
        let names: Vec<_> = mirror
            .in_namespace("ab")
            .map(|(key, _)| &key.name)
            .collect();
        assert_eq!(names, ["a", "b"]);
    }

    proptest! {
        #[test]
        fn cache_holds_the_last_event_of_each_object(
            words in prop::collection::vec((0u8..6, prop::option::of(0u8..3)), 0..60),
            relist_at in 0usize..60,
        ) {
            let mut mirror = Cache::default();
            let mut last = BTreeMap::new();
            for (at, (name, value)) in words.into_iter().enumerate() {
                let key = key("n", &name.to_string());
                let before = mirror.get(&key).copied();
                let changed = match value {
                    Some(_) => mirror.apply(Event::Apply((key.clone(), value))),
                    None => mirror.apply(Event::Delete((key.clone(), Some(0)))),
                };
                prop_assert_eq!(changed.is_empty(), before == value);
                match value {
                    Some(value) => last.insert(key, value),
                    None => last.remove(&key),
                };
                if at == relist_at {
                    mirror.apply(Event::Init);
                    for (key, value) in &last {
                        mirror.apply(Event::InitApply((key.clone(), Some(*value))));
                    }
                    prop_assert!(mirror.apply(Event::InitDone).is_empty());
                }
                prop_assert!(mirror.iter().eq(last.iter()));
            }
        }
    }
}
