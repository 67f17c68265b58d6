//! Mutates samples, because samples with a few changed bytes reach every field, unlike random
//! bytes.

use bolero::{TypeGenerator, ValueGenerator, produce};

/// Changes of one sample.
#[derive(Clone, Debug)]
pub(crate) struct Edits {
    /// The index of the sample, modulo their number.
    sample: u8,
    edits: Vec<Edit>,
}

/// One change. Places are modulo the length.
#[derive(Clone, Debug, TypeGenerator)]
enum Edit {
    Set(u16, Byte),
    Insert(u16, Byte),
    Remove(u16, u8),
    Double(u16, u8),
    /// Continues with the tail of another sample.
    Splice(u16, u8, u16),
    Cut(u16),
}

/// Prefers bytes at the edges of lengths, indexes, numbers and text.
#[derive(Clone, Debug, TypeGenerator)]
enum Byte {
    Any(u8),
    Edge(u8),
}

const EDGES: &[u8] =
    b"\x00\x01\x02\x05\x3e\x3f\x40\x5f\x60\x61\x7f\x80\xfe\xff 019af:/,;()-+=.\\\n\"{}[]";

impl Byte {
    fn get(&self) -> u8 {
        match self {
            Byte::Any(byte) => *byte,
            Byte::Edge(index) => EDGES[usize::from(*index) % EDGES.len()],
        }
    }
}

/// Generates up to six changes; none leaves a sample as it is.
pub(crate) fn edits() -> impl ValueGenerator<Output = Edits> {
    let edits = produce::<Vec<Edit>>().with().len(0..=6usize);
    (produce::<u8>(), edits).map_gen(|(sample, edits)| Edits { sample, edits })
}

impl Edits {
    /// Returns a changed sample.
    pub(crate) fn apply(&self, samples: &[Vec<u8>]) -> Vec<u8> {
        let pick = |index: u8| &samples[usize::from(index) % samples.len()];
        let mut bytes = pick(self.sample).clone();
        for edit in &self.edits {
            let length = bytes.len();
            let place = |at: &u16| usize::from(*at) % (length + 1);
            let range = |at: &u16, many: &u8| {
                let from = place(at);
                from..(from + usize::from(*many % 32)).min(length)
            };
            match edit {
                Edit::Set(at, byte) => {
                    if let Some(changed) = bytes.get_mut(place(at)) {
                        *changed = byte.get();
                    }
                }
                Edit::Insert(at, byte) => bytes.insert(place(at), byte.get()),
                Edit::Remove(at, many) => drop(bytes.drain(range(at, many))),
                Edit::Double(at, many) => bytes.extend_from_within(range(at, many)),
                Edit::Splice(at, other, from) => {
                    let other = pick(*other);
                    let from = usize::from(*from) % (other.len() + 1);
                    bytes.truncate(place(at));
                    bytes.extend_from_slice(&other[from..]);
                }
                Edit::Cut(at) => bytes.truncate(place(at)),
            }
        }
        bytes
    }
}
