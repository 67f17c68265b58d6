//! Encodes the requests and responses about retained memory.

use super::{LeaseName, RetainedRefusal, RetainedRequest, RetainedResponse};
use crate::messages::DecodeError;
use crate::messages::codec::{Decoder, encode_account, encode_name};

pub(in super::super) fn encode_request(out: &mut Vec<u8>, question: &RetainedRequest) {
    match question {
        RetainedRequest::Open {
            version,
            image,
            account,
            name,
            key,
            bytes,
        } => {
            out.push(1);
            out.extend_from_slice(&version.to_le_bytes());
            out.extend_from_slice(&image.to_le_bytes());
            encode_account(out, account);
            encode_name(out, name.as_str());
            out.extend_from_slice(key);
            out.extend_from_slice(&bytes.to_le_bytes());
        }
        RetainedRequest::Commit {
            version,
            lease,
            token,
            checksum,
        } => {
            out.push(2);
            out.extend_from_slice(&version.to_le_bytes());
            encode_numbers(out, &[*lease, *token, *checksum]);
        }
        RetainedRequest::Discard { version, lease } => {
            out.push(3);
            out.extend_from_slice(&version.to_le_bytes());
            encode_numbers(out, &[*lease]);
        }
    }
}

pub(in super::super) fn decode_request(
    decoder: &mut Decoder<'_>,
) -> Result<RetainedRequest, DecodeError> {
    Ok(match decoder.u8()? {
        1 => RetainedRequest::Open {
            version: decoder.u16()?,
            image: decoder.u64()?,
            account: decoder.account()?,
            name: LeaseName::try_from(decoder.name()?)?,
            key: decoder.array()?,
            bytes: decoder.u64()?,
        },
        2 => RetainedRequest::Commit {
            version: decoder.u16()?,
            lease: decoder.u64()?,
            token: decoder.u64()?,
            checksum: decoder.u64()?,
        },
        3 => RetainedRequest::Discard {
            version: decoder.u16()?,
            lease: decoder.u64()?,
        },
        _ => return Err(DecodeError::BadValue("question about retained memory")),
    })
}

pub(in super::super) fn encode_response(out: &mut Vec<u8>, answer: &RetainedResponse) {
    match *answer {
        RetainedResponse::Ready {
            lease,
            generation,
            bytes,
            checksum,
        } => {
            out.push(1);
            encode_numbers(out, &[lease, generation, bytes, checksum]);
        }
        RetainedResponse::Write {
            lease,
            generation,
            bytes,
            token,
            expires_ms,
        } => {
            out.push(2);
            encode_numbers(out, &[lease, generation, bytes, token, expires_ms]);
        }
        RetainedResponse::Committed => out.push(3),
        RetainedResponse::Discarded => out.push(4),
        RetainedResponse::Refused(why) => {
            out.push(5);
            encode_refusal(out, why);
        }
    }
}

pub(in super::super) fn decode_response(
    decoder: &mut Decoder<'_>,
) -> Result<RetainedResponse, DecodeError> {
    Ok(match decoder.u8()? {
        1 => RetainedResponse::Ready {
            lease: decoder.u64()?,
            generation: decoder.u64()?,
            bytes: decoder.u64()?,
            checksum: decoder.u64()?,
        },
        2 => RetainedResponse::Write {
            lease: decoder.u64()?,
            generation: decoder.u64()?,
            bytes: decoder.u64()?,
            token: decoder.u64()?,
            expires_ms: decoder.u64()?,
        },
        3 => RetainedResponse::Committed,
        4 => RetainedResponse::Discarded,
        5 => RetainedResponse::Refused(decode_refusal(decoder)?),
        _ => return Err(DecodeError::BadValue("answer about retained memory")),
    })
}

fn encode_refusal(out: &mut Vec<u8>, why: RetainedRefusal) {
    match why {
        RetainedRefusal::Missing => out.push(1),
        RetainedRefusal::Quota { free } => {
            out.push(2);
            encode_numbers(out, &[free]);
        }
        RetainedRefusal::Writing => out.push(3),
        RetainedRefusal::NotScrubbed => out.push(4),
        RetainedRefusal::Fenced => out.push(5),
        RetainedRefusal::Unavailable => out.push(6),
        RetainedRefusal::TooMany => out.push(7),
        RetainedRefusal::Off => out.push(9),
        RetainedRefusal::GpuLimit { free } => {
            out.push(10);
            encode_numbers(out, &[free]);
        }
        RetainedRefusal::Driver { code } => {
            out.push(8);
            out.extend_from_slice(&code.to_le_bytes());
        }
    }
}

fn decode_refusal(decoder: &mut Decoder<'_>) -> Result<RetainedRefusal, DecodeError> {
    Ok(match decoder.u8()? {
        1 => RetainedRefusal::Missing,
        2 => RetainedRefusal::Quota {
            free: decoder.u64()?,
        },
        3 => RetainedRefusal::Writing,
        4 => RetainedRefusal::NotScrubbed,
        5 => RetainedRefusal::Fenced,
        6 => RetainedRefusal::Unavailable,
        7 => RetainedRefusal::TooMany,
        8 => RetainedRefusal::Driver {
            code: i32::from_le_bytes(decoder.array()?),
        },
        9 => RetainedRefusal::Off,
        10 => RetainedRefusal::GpuLimit {
            free: decoder.u64()?,
        },
        _ => return Err(DecodeError::BadValue("refusal")),
    })
}

fn encode_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        out.extend_from_slice(&number.to_le_bytes());
    }
}
