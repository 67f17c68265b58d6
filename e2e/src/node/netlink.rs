//! Sends two requests of rtnetlink(7), so that the node's namespace needs no `ip` program.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

/// The index of the loopback link in every network namespace.
pub(super) const LOOPBACK: i32 = 1;

// Constants of linux/rtnetlink.h, linux/netlink.h, linux/if.h and linux/if_addr.h.
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const IFF_UP: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const AF_INET: u8 = 2;
const HEADER: usize = 16;

/// Sets the link's state to up.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn set_link_up(link: i32) -> io::Result<()> {
    let mut body = vec![0; 4];
    body.extend(link.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    request(RTM_NEWLINK, 0, &body)
}

/// Adds an address with a prefix length of 32 to the link.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn add_address(link: i32, address: Ipv4Addr) -> io::Result<()> {
    let mut body = vec![AF_INET, 32, 0, 0];
    body.extend(link.to_ne_bytes());
    for attribute in [IFA_LOCAL, IFA_ADDRESS] {
        body.extend(8u16.to_ne_bytes());
        body.extend(attribute.to_ne_bytes());
        body.extend(address.octets());
    }
    request(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, &body)
}

fn request(kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    // Protocol 0 is NETLINK_ROUTE.
    let socket: OwnedFd = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    send(&socket, &message(kind, flags, body), SendFlags::empty())?;
    let mut answer = [0; 4096];
    let (_, length) = recv(&socket, &mut answer, RecvFlags::empty())?;
    parse_reply(&answer[..length])
}

fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = (HEADER + body.len()) as u32;
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    message
}

/// Parses an acknowledgement, which is an error message with code 0.
fn parse_reply(answer: &[u8]) -> io::Result<()> {
    let field = |from: usize, to: usize| answer.get(from..to);
    let (Some([low, high]), Some(&[a, b, c, d])) = (field(4, 6), field(HEADER, HEADER + 4)) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "short netlink answer",
        ));
    };
    if u16::from_ne_bytes([*low, *high]) != NLMSG_ERROR {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "netlink answer is no acknowledgement",
        ));
    }
    match i32::from_ne_bytes([a, b, c, d]) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_header_holds_its_length() {
        let message = message(RTM_NEWLINK, 0, &[0; 16]);
        assert_eq!(message.len(), 32);
        assert_eq!(message[..4], 32u32.to_ne_bytes());
    }

    #[test]
    fn parse_reply_returns_the_kernels_error() {
        let mut answer = message(NLMSG_ERROR, 0, &(-17i32).to_ne_bytes());
        assert_eq!(
            parse_reply(&answer).unwrap_err().kind(),
            io::ErrorKind::AlreadyExists
        );
        answer.truncate(18);
        assert!(parse_reply(&answer).is_err());
    }
}
