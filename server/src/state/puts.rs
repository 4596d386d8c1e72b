//! Turns of puts: what clients upload at once fits into memory, however many they are.

use super::Memory;
use super::Tenant;
use super::parts::{Part, Parts};
use kvarts_wire::limits::{MEMORY_PER_PUT, PUTS_WAITING, WAIT};

/// The turns.
#[derive(Debug)]
pub struct Puts(Parts);

impl Puts {
    /// As many as the memory of requests has room for. Where there are several tenants, each has turns and places to wait
    /// that no other can take.
    pub fn new(memory: &Memory, tenants: &[u32]) -> Self {
        let total: usize = memory.usage().iter().map(|usage| usage.total).sum();
        let turns = (total as u64 / MEMORY_PER_PUT).max(2);
        Self(Parts::new(turns, tenants, 1, PUTS_WAITING))
    }

    /// Divides them among these tenants.
    pub fn divide(&self, tenants: &[u32]) {
        self.0.divide(tenants);
    }

    /// A turn for a tenant as soon as there is one; none if too many wait already.
    pub async fn turn(&self, tenant: u32) -> Option<Part> {
        self.0.take(tenant, 1).await
    }

    /// Has a put go on with `bytes` bytes more: when they are within its tenant's own bandwidth, and with a turn. False
    /// if it gets none. A put that waits for its tenant's bandwidth keeps no turn from others meanwhile.
    pub async fn go_on(&self, tenant: &Tenant, bytes: u64, turn: &mut Option<Part>) -> bool {
        let toll = tenant.toll(bytes);
        if !toll.is_zero() {
            *turn = None;
            tokio::time::sleep(toll).await;
        }
        if turn.is_none() {
            *turn = tokio::time::timeout(WAIT, self.turn(tenant.number)).await.ok().flatten();
        }
        turn.is_some()
    }

    /// Turns that are left, and puts that wait for one.
    pub fn left(&self) -> (u64, usize) {
        self.0.left()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tenant::TenantLimits;
    use kvarts_contract::blocking::block_on;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn there_are_as_many_turns_as_fit_and_a_bounded_queue() {
        let puts = Puts::new(&Memory::new(16 << 20, 4096, 0).unwrap(), &[0]);
        let turns: Vec<_> = (0..4).map(|_| block_on(puts.turn(0)).unwrap()).collect();
        let mut waiting: Vec<_> = (0..PUTS_WAITING).map(|_| Box::pin(puts.turn(0))).collect();
        let mut context = Context::from_waker(Waker::noop());
        for one in &mut waiting {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(puts.left(), (0, PUTS_WAITING));
        assert!(matches!(pin!(puts.turn(0)).as_mut().poll(&mut context), Poll::Ready(None)));
        assert_eq!(puts.left(), (0, PUTS_WAITING));
        drop(turns);
        drop(waiting);
        assert_eq!(puts.left(), (4, 0));
    }

    #[test]
    fn a_put_that_waits_for_its_tenants_bandwidth_keeps_no_turn_from_others() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _inside = runtime.enter();
        let puts = Puts::new(&Memory::new(16 << 20, 4096, 0).unwrap(), &[0]);
        let limits = TenantLimits { bandwidth: Some(1), ..TenantLimits::default() };
        let (throttled, free) = (Tenant::new("slow", 0, None, limits), Tenant::only());
        let mut turn = Some(block_on(puts.turn(0)).unwrap());
        assert_eq!(puts.left(), (3, 0));
        let mut context = Context::from_waker(Waker::noop());
        let mut waiting = Box::pin(puts.go_on(&throttled, 1 << 40, &mut turn));
        assert!(waiting.as_mut().poll(&mut context).is_pending(), "it is within its bandwidth");
        assert_eq!(puts.left(), (4, 0), "it keeps its turn while it waits");
        drop(waiting);
        // A put that need not wait keeps the turn that it has.
        let mut own = None;
        for _ in 0..2 {
            assert!(block_on(puts.go_on(&free, 1 << 40, &mut own)) && puts.left() == (3, 0));
        }
    }

    #[test]
    fn whatever_others_upload_each_tenant_has_turns_and_places() {
        for count in [2, 3, 5] {
            let tenants: Vec<u32> = (1..=count).collect();
            let puts = Puts::new(&Memory::new(64 << 20, 4096, 0).unwrap(), &tenants);
            let mut context = Context::from_waker(Waker::noop());
            let mut turns = Vec::new();
            let mut waiting = Vec::new();
            for tenant in 1..count {
                loop {
                    let mut turn = Box::pin(puts.turn(tenant));
                    match turn.as_mut().poll(&mut context) {
                        Poll::Ready(Some(turn)) => turns.push(turn),
                        Poll::Ready(None) => break,
                        Poll::Pending => waiting.push(turn),
                    }
                }
            }
            let own = 16 / 2 / count;
            let others: Vec<_> = (0..own).map(|_| block_on(puts.turn(count)).unwrap()).collect();
            assert!(pin!(puts.turn(count)).as_mut().poll(&mut context).is_pending(), "and a place to wait");
            assert!(waiting.len() <= PUTS_WAITING);
            drop((turns, waiting, others));
            assert_eq!(puts.left(), (16, 0));
        }
    }
}
