//! Bytes and descriptors over a unix socket, in either direction.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::limits::{DESCRIPTORS_MAX, DESCRIPTORS_WAITING_MAX};

/// Descriptors that the kernel takes along with one message, at most (`SCM_MAX_FD`).
const KERNEL_MAX: usize = 253;

/// Takes what there is into `bytes` and `descriptors`; 0 when the other end is gone. More descriptors than may wait, or
/// than may come at once, are an error, and are among `descriptors` all the same: the caller closes them where it wants to.
pub fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    flags: RecvFlags,
) -> Result<usize, Errno> {
    // Room for all that can come: the kernel closes here what does not fit, which may take long.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let mut came = 0;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            for descriptor in rights {
                came += 1;
                descriptors.push(descriptor);
            }
        }
    }
    let too_many = came > DESCRIPTORS_MAX || descriptors.len() > DESCRIPTORS_WAITING_MAX;
    if too_many || got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::TOOMANYREFS);
    }
    Ok(got.bytes)
}

/// Sends as much of `parts` as there is room for, and with it a descriptor.
pub fn send(socket: impl AsFd, parts: &[IoSlice<'_>], descriptor: Option<&OwnedFd>) -> Result<usize, Errno> {
    send_with(socket, parts, descriptor, SendFlags::NOSIGNAL)
}

/// The same, without waiting for room.
pub fn try_send(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptor: Option<&OwnedFd>,
) -> Result<usize, Errno> {
    send_with(socket, parts, descriptor, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

fn send_with(
    socket: impl AsFd,
    parts: &[IoSlice<'_>],
    descriptor: Option<&OwnedFd>,
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor.as_fd()]);
    if let Some(descriptors) = &descriptors {
        // There is room for one.
        let _ = control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    rustix::net::sendmsg(socket, parts, &mut control, flags)
}
