//! What large requests take in memory while they arrive, until their answers are gone: each tenant has a part of it.

use super::parts::{Part, Parts};
use kvarts_wire::limits;

/// What large requests take in memory, of all tenants together, in KiB.
#[derive(Debug)]
pub struct Receiving(Parts);

impl Receiving {
    /// For these tenants.
    pub fn new(tenants: &[u32]) -> Self {
        Self(Parts::new(limits::LARGE_BYTES_MAX as u64 >> 10, tenants, 0, limits::LARGE_WAITING))
    }

    /// Divides it among these tenants.
    pub fn divide(&self, tenants: &[u32]) {
        self.0.divide(tenants);
    }

    /// Bytes that are taken now.
    pub fn bytes(&self) -> u64 {
        self.0.used() << 10
    }

    /// Large requests that wait.
    pub fn waiting(&self) -> usize {
        self.0.left().1
    }

    /// The part of a message of this length for a tenant, as soon as there is room.
    pub(crate) async fn take(&self, tenant: u32, length: usize) -> Option<Part> {
        let counted = length.min(limits::MESSAGE_BYTES_MAX).saturating_mul(limits::LARGE_FACTOR) >> 10;
        self.0.take(tenant, (counted as u64).min(self.0.most(tenant)).max(1)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvarts_contract::blocking::block_on;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn whatever_some_tenants_send_each_other_one_has_its_part_of_large_requests() {
        for count in [2, 3, 5] {
            let tenants: Vec<u32> = (1..=count).collect();
            let all = Receiving::new(&tenants);
            let mut context = Context::from_waker(Waker::noop());
            let (mut held, mut waiting) = (Vec::new(), Vec::new());
            for tenant in 1..count {
                loop {
                    let mut taking = Box::pin(all.take(tenant, 1 << 20));
                    match taking.as_mut().poll(&mut context) {
                        Poll::Ready(Some(part)) => held.push(part),
                        Poll::Ready(None) => break,
                        Poll::Pending => waiting.push(taking),
                    }
                }
            }
            assert!(all.bytes() <= limits::LARGE_BYTES_MAX as u64);
            assert!(waiting.len() <= limits::LARGE_WAITING, "a later one is refused at once");
            assert!(block_on(all.take(count, 1 << 20)).is_some(), "{count} tenants");
            drop((held, waiting));
            assert_eq!((all.bytes(), all.waiting()), (0, 0));
        }
    }
}
