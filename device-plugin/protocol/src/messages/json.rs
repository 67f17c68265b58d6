//! Encodes messages between root's own processes as JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{DecodeError, Message};

/// A message whose payload is JSON. The same message has several texts of JSON, and the parser is
/// serde's, so no tenant process may send one.
pub trait JsonMessage: Serialize + DeserializeOwned {}

impl<M: JsonMessage> Message for M {
    fn payload(&self) -> Vec<u8> {
        encode(self)
    }

    fn parse(payload: &[u8]) -> Result<M, DecodeError> {
        serde_json::from_slice(payload).map_err(|_| DecodeError::BadValue("JSON"))
    }
}

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("numbers and text are JSON")
}
