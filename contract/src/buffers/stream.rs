//! Bytes of a stream straight into memory, and straight out of it: nothing is copied on this side of the kernel.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg};

use super::buf::SharedBuf;
use super::vectors::IoVec;

/// Ranges that the kernel is given at once, at most.
const AT_ONCE: usize = 64;

/// Ranges of memory that a stream fills or empties one after the other, and how far it came.
///
/// The rule of [`SharedBuf`] holds: the caller that gives the ranges leaves them alone until the stream has passed them, or
/// until this is dropped. The kernel has them during a call of [`Stretch::receive`] or [`Stretch::send`] and at no other
/// time.
#[derive(Debug, Default)]
pub struct Stretch {
    ranges: Vec<SharedBuf>,
    /// The range that the stream is in, and how many bytes of it are behind.
    at: usize,
    within: usize,
}

impl Stretch {
    /// Nothing yet, with room for this many ranges.
    pub fn with_capacity(ranges: usize) -> Self {
        Self { ranges: Vec::with_capacity(ranges), at: 0, within: 0 }
    }

    /// One more range behind the others.
    pub fn push(&mut self, range: SharedBuf) {
        self.ranges.push(range);
    }

    /// The ranges that the stream has passed to their ends.
    pub fn passed(&self) -> usize {
        self.at
    }

    /// A range, whether the stream has passed it or not.
    pub fn range(&self, at: usize) -> Option<&SharedBuf> {
        self.ranges.get(at)
    }

    /// Whether the stream has passed all of them.
    pub fn is_done(&self) -> bool {
        self.at >= self.ranges.len()
    }

    /// Takes bytes that came another way, and says how many there was room for.
    pub fn fill(&mut self, bytes: &[u8]) -> usize {
        let mut left = bytes;
        while let Some(range) = self.ranges.get(self.at) {
            let (some, rest) = left.split_at(left.len().min(range.len() - self.within));
            range.copy_in(self.within, some);
            self.pass(some.len());
            left = rest;
            if left.is_empty() {
                break;
            }
        }
        bytes.len() - left.len()
    }

    /// Gives bytes for another way, and says how many there were.
    pub fn drain(&mut self, into: &mut [u8]) -> usize {
        let done = self.copy_out(into);
        self.pass(done);
        done
    }

    /// Takes what has come, without waiting, and says how many bytes: none only if the other end sends no more, or if all
    /// ranges are full.
    pub fn receive(&mut self, socket: impl AsFd) -> Result<usize, Errno> {
        let (mut vectors, count) = self.vectors();
        if count == 0 {
            // Asked for nothing, the kernel says whether anything has come.
            return Ok(0);
        }
        // SAFETY: `IoSliceMut` and `IoVec` both have the layout of the kernel's `iovec`. No slice is ever made of the memory
        // on this side: the vector goes to the kernel as it is, and `ranges` holds the memory until the call has returned.
        let slices = unsafe {
            std::slice::from_raw_parts_mut(vectors.as_mut_ptr().cast::<IoSliceMut<'_>>(), count.min(AT_ONCE))
        };
        let got = recvmsg(socket, slices, &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT)?.bytes;
        self.pass(got);
        Ok(got)
    }

    /// Sends as much as there is room for, without waiting, and says how many bytes.
    pub fn send(&mut self, socket: impl AsFd) -> Result<usize, Errno> {
        let (vectors, count) = self.vectors();
        // SAFETY: as in `receive`.
        let slices =
            unsafe { std::slice::from_raw_parts(vectors.as_ptr().cast::<IoSlice<'_>>(), count.min(AT_ONCE)) };
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), flags)?;
        self.pass(sent);
        Ok(sent)
    }

    /// Copies the next bytes without passing them, and says how many there are of them.
    pub fn copy_out(&self, bytes: &mut [u8]) -> usize {
        let (mut done, mut within) = (0, self.within);
        for range in self.ranges.iter().skip(self.at) {
            let len = (range.len() - within).min(bytes.len() - done);
            let Some(into) = bytes.get_mut(done..done + len).filter(|into| !into.is_empty()) else { break };
            range.copy_out(within, into);
            (done, within) = (done + len, 0);
        }
        done
    }

    /// The next ranges as the kernel takes them, those that lie side by side as one.
    fn vectors(&self) -> ([IoVec; AT_ONCE], usize) {
        let (mut vectors, mut count, mut within) = ([IoVec::empty(); AT_ONCE], 0, self.within);
        for range in self.ranges.iter().skip(self.at) {
            let next = IoVec::rest(range, std::mem::take(&mut within));
            if count > 0 && vectors[count - 1].join(next) {
                continue;
            }
            if count == AT_ONCE {
                break;
            }
            vectors[count] = next;
            count += 1;
        }
        (vectors, count)
    }

    /// Goes on behind `bytes` bytes, which were sent or received in another way.
    pub fn pass(&mut self, bytes: usize) {
        let mut left = bytes;
        while let Some(range) = self.ranges.get(self.at) {
            let rest = range.len() - self.within;
            if left < rest {
                self.within += left;
                return;
            }
            left -= rest;
            (self.at, self.within) = (self.at + 1, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::BufMut;
    use std::os::unix::net::UnixStream;

    fn some(len: usize, byte: impl Fn(usize) -> u8) -> SharedBuf {
        let mut buf = BufMut::zeroed(len).unwrap();
        buf.copy_in(0, &(0..len).map(byte).collect::<Vec<_>>());
        buf.share()
    }

    /// All parts of a memory of 1,000 bytes, in an order of their own.
    fn parts(memory: &SharedBuf, order: &[usize], each: usize) -> Stretch {
        let mut stretch = Stretch::with_capacity(order.len());
        for at in order {
            stretch.push(memory.slice(at * each, each).unwrap());
        }
        stretch
    }

    #[test]
    fn bytes_go_from_range_to_range_in_order_whatever_the_kernel_takes_at_once() {
        let (one, other) = UnixStream::pair().unwrap();
        let order: Vec<usize> = (0..200).map(|at| at * 7 % 200).collect();
        let (from, to) = (some(1000, |at| (at / 5) as u8), some(1000, |_| 0));
        let (mut source, mut target) = (parts(&from, &order, 5), parts(&to, &order, 5));
        while !target.is_done() {
            while !source.is_done() && source.send(&one).is_ok() {}
            assert!(target.receive(&other).unwrap() > 0);
        }
        assert_eq!((to.to_vec(), target.passed()), (from.to_vec(), 200));
        assert_eq!(target.receive(&other), Ok(0), "there is no room");
        let (mut source, mut target, mut between) =
            (parts(&from, &order, 5), parts(&some(1000, |_| 0), &order, 5), [0; 7]);
        while !source.is_done() {
            let some = source.drain(&mut between);
            assert_eq!(target.fill(&between[..some]), some);
        }
        assert_eq!((target.is_done(), target.fill(&[1]), source.drain(&mut between)), (true, 0, 0));
        let copied: Vec<u8> = target.ranges.iter().flat_map(SharedBuf::to_vec).collect();
        assert_eq!(copied, order.iter().flat_map(|at| [*at as u8; 5]).collect::<Vec<_>>());
        let neighbours = parts(&to, &(0..200).collect::<Vec<_>>(), 5);
        assert_eq!(neighbours.vectors().1, 1, "neighbours are one");
    }

    #[test]
    fn nothing_is_waited_for_and_the_end_of_a_stream_is_told() {
        let (one, other) = UnixStream::pair().unwrap();
        let mut target = parts(&some(10, |_| 0), &[0, 1], 5);
        assert_eq!(target.receive(&other), Err(Errno::AGAIN));
        assert_eq!(rustix::io::write(&one, &[1, 2, 3, 4, 5, 6]), Ok(6));
        assert_eq!((target.receive(&other), target.passed()), (Ok(6), 1));
        drop(one);
        assert_eq!((target.receive(&other), target.is_done()), (Ok(0), false));
        assert_eq!(target.range(0).map(SharedBuf::to_vec), Some(vec![1, 2, 3, 4, 5]));
        let mut source = parts(&some(10, |_| 0), &[0, 1], 5);
        assert_eq!(source.send(&other), Err(Errno::PIPE), "and no signal");
    }
}
