//! Any sequence of requests against a device that answers anything.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Move {
    Read { pages: usize, class: usize },
    Write { pages: usize, sync: bool },
    Batch { extents: usize },
    Flush,
    Poll(usize),
    Drop(usize),
    End { which: usize, result: Answer },
    Double(usize),
    Late,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Whole,
    Part(usize),
    Nothing,
    Error(i32),
    TooMuch,
}

fn any_move() -> impl Strategy<Value = Move> {
    let answer = prop_oneof![
        4 => Just(Answer::Whole),
        2 => (1_usize..20_000).prop_map(Answer::Part),
        1 => Just(Answer::Nothing),
        2 => prop_oneof![Just(4), Just(5), Just(11), Just(28)].prop_map(Answer::Error),
        1 => Just(Answer::TooMuch),
    ];
    prop_oneof![
        4 => (0_usize..12, 0..Class::ALL.len()).prop_map(|(pages, class)| Move::Read { pages, class }),
        2 => (1_usize..12, any::<bool>()).prop_map(|(pages, sync)| Move::Write { pages, sync }),
        1 => (1_usize..20).prop_map(|extents| Move::Batch { extents }),
        1 => Just(Move::Flush),
        4 => any::<usize>().prop_map(Move::Poll),
        2 => any::<usize>().prop_map(Move::Drop),
        8 => (any::<usize>(), answer).prop_map(|(which, result)| Move::End { which, result }),
        1 => any::<usize>().prop_map(Move::Double),
        1 => Just(Move::Late),
    ]
}

enum Held {
    One(Transfer),
    Many(ReadBatch),
}

fn is_over(bench: &Bench, held: &mut Held) -> bool {
    match held {
        Held::One(transfer) => bench.poll(transfer).is_ready(),
        Held::Many(batch) => loop {
            match bench.next(batch) {
                Poll::Ready(Some(_)) => {}
                done => break done.is_ready(),
            }
        },
    }
}

fn answer(bench: &Bench, which: usize, result: Answer) -> Option<Token> {
    let mut disk = bench.disk.borrow_mut();
    let which = which.checked_rem(disk.under_way.len())?;
    let (token, op) = disk.under_way.remove(which)?;
    let len = range(&op).1;
    let result = match result {
        Answer::Whole => len as i32,
        Answer::Part(bytes) => bytes.min(len) as i32,
        Answer::Nothing => 0,
        Answer::Error(errno) => -errno,
        Answer::TooMuch => len as i32 + 1,
    };
    disk.answer(token, result);
    Some(token)
}

proptest! {
    #[test]
    fn whatever_the_device_answers_every_limit_holds_and_all_memory_comes_back(
        moves in prop::collection::vec(any_move(), 1..80)
    ) {
        let limit = 10 * PAGE as u64;
        let limits = Limits {
            max_ops: 6,
            max_bytes_in_flight: limit,
            foreground_reserve: 2 * PAGE as u64,
            max_stuck_bytes: 0,
            beside_urgent: 2 * PAGE as u64,
            urgent_remembered: 20 * PAGE as u64,
        };
        let bench = Bench::new(limits);
        let memory = memory(12);
        let mut held: Vec<Held> = Vec::new();
        let mut ended = Vec::new();
        for step in moves {
            match step {
                Move::Read { pages, class } => {
                    let buf = memory.slice(0, pages * PAGE).unwrap();
                    held.push(Held::One(bench.driver.read(Class::ALL[class], FILE, 0, buf)));
                }
                Move::Write { pages, sync } => {
                    let parts = (0..pages).map(|at| memory.slice(at * PAGE, PAGE).unwrap().into()).collect();
                    held.push(Held::One(bench.driver.write_v(Class::Put, FILE, 0, parts, sync)));
                }
                Move::Batch { extents } => {
                    let mut batch = bench.driver.batch(Class::Prefetch);
                    (0..extents).for_each(|at| batch.push(at as u64, FILE, 0, memory.slice(0, 99).unwrap()));
                    held.push(Held::Many(batch));
                }
                Move::Flush => held.push(Held::One(bench.driver.flush(FILE))),
                Move::Poll(which) => {
                    if let Some(which) = which.checked_rem(held.len())
                        && is_over(&bench, &mut held[which])
                    {
                        held.swap_remove(which);
                    }
                }
                Move::Drop(which) => {
                    if let Some(which) = which.checked_rem(held.len()) {
                        held.swap_remove(which);
                    }
                }
                Move::End { which, result } => ended.extend(answer(&bench, which, result)),
                Move::Double(which) => {
                    if let Some(which) = which.checked_rem(ended.len()) {
                        bench.disk.borrow_mut().answer(ended[which], 1);
                    }
                }
                Move::Late => bench.disk.borrow_mut().answer(Token(u64::MAX), 1),
            }
            bench.driver.pump();
            let metrics = bench.driver.metrics();
            prop_assert!(metrics.slots <= 6 && metrics.in_flight_bytes <= limit, "{metrics:?}");
            prop_assert_eq!(metrics.in_flight_ops, bench.under_way() as u64);
        }
        // A device that works again lets everything end.
        for _ in 0..2000 {
            held.retain_mut(|held| !is_over(&bench, held));
            if answer(&bench, 0, Answer::Whole).is_none() && held.is_empty() {
                break;
            }
            bench.driver.pump();
        }
        prop_assert!(held.is_empty(), "something waits for ever");
        bench.assert_idle(&[&memory]);
    }
}
