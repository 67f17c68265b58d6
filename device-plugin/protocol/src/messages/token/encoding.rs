//! Encodes the requests and responses about memory tokens.

use super::{
    Generation, Generations, GpuToken, MemoryId, TokenRefusal, TokenRequest, TokenResponse,
};
use crate::messages::DecodeError;
use crate::messages::codec::{Decoder, encode_account};

pub(in super::super) fn encode_request(out: &mut Vec<u8>, question: &TokenRequest) {
    match question {
        TokenRequest::Seal {
            version,
            account,
            lease,
            block,
        } => {
            out.push(1);
            out.extend_from_slice(&version.to_le_bytes());
            encode_account(out, account);
            encode_numbers(out, &[*lease, *block]);
        }
        TokenRequest::Redeem { version, token } => {
            out.push(2);
            out.extend_from_slice(&version.to_le_bytes());
            encode_token(out, token);
        }
    }
}

pub(in super::super) fn decode_request(
    decoder: &mut Decoder<'_>,
) -> Result<TokenRequest, DecodeError> {
    Ok(match decoder.u8()? {
        1 => TokenRequest::Seal {
            version: decoder.u16()?,
            account: decoder.account()?,
            lease: decoder.u64()?,
            block: decoder.u64()?,
        },
        2 => TokenRequest::Redeem {
            version: decoder.u16()?,
            token: decode_token(decoder)?,
        },
        _ => return Err(DecodeError::BadValue("question about tokens")),
    })
}

pub(in super::super) fn encode_response(out: &mut Vec<u8>, answer: &TokenResponse) {
    match answer {
        TokenResponse::Sealed(token) => {
            out.push(1);
            encode_token(out, token);
        }
        TokenResponse::Redeemed(id) => {
            out.push(2);
            encode_memory(out, id);
        }
        TokenResponse::Refused(why) => {
            out.push(3);
            encode_refusal(out, why);
        }
    }
}

pub(in super::super) fn decode_response(
    decoder: &mut Decoder<'_>,
) -> Result<TokenResponse, DecodeError> {
    Ok(match decoder.u8()? {
        1 => TokenResponse::Sealed(decode_token(decoder)?),
        2 => TokenResponse::Redeemed(decode_memory(decoder)?),
        3 => TokenResponse::Refused(decode_refusal(decoder)?),
        _ => return Err(DecodeError::BadValue("answer about tokens")),
    })
}

fn encode_refusal(out: &mut Vec<u8>, why: &TokenRefusal) {
    match why {
        TokenRefusal::Malformed => out.push(1),
        TokenRefusal::Forged => out.push(2),
        TokenRefusal::Elsewhere { node } => {
            out.push(3);
            encode_text(out, node);
        }
        TokenRefusal::Unknown => out.push(4),
        TokenRefusal::Fenced { which, generation } => {
            let which = match which {
                Generation::Gpu => 1,
                Generation::Process => 2,
                Generation::Lease => 3,
            };
            out.extend_from_slice(&[5, which]);
            encode_numbers(out, &[*generation]);
        }
        TokenRefusal::AskerFenced => out.push(6),
        TokenRefusal::NoSession => out.push(7),
        TokenRefusal::NoLease => out.push(8),
        TokenRefusal::Unavailable => out.push(9),
    }
}

fn decode_refusal(decoder: &mut Decoder<'_>) -> Result<TokenRefusal, DecodeError> {
    Ok(match decoder.u8()? {
        1 => TokenRefusal::Malformed,
        2 => TokenRefusal::Forged,
        3 => TokenRefusal::Elsewhere {
            node: decode_text(decoder)?,
        },
        4 => TokenRefusal::Unknown,
        5 => TokenRefusal::Fenced {
            which: match decoder.u8()? {
                1 => Generation::Gpu,
                2 => Generation::Process,
                3 => Generation::Lease,
                _ => return Err(DecodeError::BadValue("generation")),
            },
            generation: decoder.u64()?,
        },
        6 => TokenRefusal::AskerFenced,
        7 => TokenRefusal::NoSession,
        8 => TokenRefusal::NoLease,
        9 => TokenRefusal::Unavailable,
        _ => return Err(DecodeError::BadValue("refusal")),
    })
}

pub(super) fn encode_memory(out: &mut Vec<u8>, id: &MemoryId) {
    let MemoryId {
        node,
        gpu,
        container,
        generations,
        block,
    } = id;
    encode_text(out, node);
    encode_text(out, gpu);
    let Generations {
        gpu,
        process,
        lease,
    } = generations;
    encode_numbers(out, &[*container, *gpu, *process, *lease, *block]);
}

pub(super) fn decode_memory(decoder: &mut Decoder<'_>) -> Result<MemoryId, DecodeError> {
    Ok(MemoryId {
        node: decode_text(decoder)?,
        gpu: decode_text(decoder)?,
        container: decoder.u64()?,
        generations: Generations {
            gpu: decoder.u64()?,
            process: decoder.u64()?,
            lease: decoder.u64()?,
        },
        block: decoder.u64()?,
    })
}

fn encode_token(out: &mut Vec<u8>, GpuToken(bytes): &GpuToken) {
    out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
    out.extend_from_slice(bytes);
}

pub(super) fn decode_token(decoder: &mut Decoder<'_>) -> Result<GpuToken, DecodeError> {
    let length = usize::from(decoder.u16()?);
    GpuToken::try_from(decoder.take(length)?.to_vec())
}

/// A node's name may be longer than [`MAX_NAME`](crate::messages::MAX_NAME).
fn encode_text(out: &mut Vec<u8>, text: &str) {
    let text = &text[..text.floor_char_boundary(usize::from(u8::MAX))];
    out.push(text.len() as u8);
    out.extend_from_slice(text.as_bytes());
}

fn decode_text(decoder: &mut Decoder<'_>) -> Result<String, DecodeError> {
    let length = usize::from(decoder.u8()?);
    let text = std::str::from_utf8(decoder.take(length)?);
    text.map(str::to_owned)
        .map_err(|_| DecodeError::BadValue("text"))
}

fn encode_numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    for number in numbers {
        out.extend_from_slice(&number.to_le_bytes());
    }
}
