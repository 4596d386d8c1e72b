//! Which directories of a store are in use, and which of those that are found count.
//!
//! A store goes on without a directory that is lost, and what is deleted meanwhile must not come back with it. So each
//! superblock has the *term* that its directory takes part in.
//!
//! - A new term begins when another set of directories is in use, and that is more than half of all. First it is *proposed* to each of
//!   them; when that is durable in all, each *takes* it. It is higher than all that these directories have taken or were proposed.
//! - Deletes are acknowledged where more than half of all directories are in use and all of these have taken one term.
//! - A store is opened with half of its directories at least. Those whose term is lower than the highest one are *behind*: before
//!   their blocks count they are told what the others know to be deleted, durably.
//! - A directory that is *replaced* does not come back beside one that knows of it: that one knows the term from which on the
//!   number counts. The empty one in its place is *new*, and is no part of any half, until it has taken a term.
//!
//! Why no delete comes back: it was acknowledged in a term that more than half of all had taken. Half of them, with which the store is
//! opened later, have one of those among them, so the highest term found is no lower; a directory that lacks the delete has a lower
//! one. Two sets never begin one term: both are more than half, so one directory was proposed it twice, and the second
//! time a higher one was chosen.

/// Directories of a store that can be replaced: numbers below this one.
pub const COUNTED: usize = 24;

/// How far beyond all terms that are known a replaced directory's number counts again. What is replaced may have been proposed the term
/// behind those, when none of the others was.
const BEYOND: u32 = 2;

/// Which of its store's directories are in use, as one directory knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Membership {
    /// The term that it takes part in.
    pub term: u32,
    /// The highest term that was proposed to it; no lower than `term`.
    pub proposed: u32,
    /// Directories that take part in the term; zero for all.
    pub in_use: u32,
    /// For each of the first directories the term from which on what it holds counts.
    pub counts_from: [u32; COUNTED],
}

/// A directory that was found: its number, and what it knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// Which of the store's directories it is.
    pub directory: u32,
    /// What it knows.
    pub membership: Membership,
}

/// What a directory that was found is to the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It takes part in the highest term.
    Current,
    /// It missed what was deleted since.
    Behind,
    /// It took the place of another one, and knows of no delete yet.
    New,
    /// It was replaced: nothing that it holds counts.
    Replaced,
}

/// Those directories of a store that were found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Members {
    /// What each of them is, in the order in which they were given.
    pub standings: Vec<Standing>,
    /// What is known of terms together.
    highest: Membership,
    /// How many count, how many of those are new, and how many there are in all.
    present: u32,
    new: u32,
    all: u32,
    /// Whether those that count are those that began the highest term.
    is_settled: bool,
}

impl Membership {
    /// What a directory is that knows this, where others know `counts_from` and the highest term of those that count is `term`.
    fn standing(&self, directory: u32, counts_from: &[u32; COUNTED], term: u32) -> Standing {
        let from = usize::try_from(directory).ok().and_then(|at| counts_from.get(at)).copied().unwrap_or(0);
        match self.term {
            _ if self.proposed.max(self.term) < from => Standing::Replaced,
            own if own < from => Standing::New,
            own if own < term => Standing::Behind,
            _ => Standing::Current,
        }
    }

    fn join(&mut self, other: &Self) {
        if other.term > self.term {
            (self.term, self.in_use) = (other.term, other.in_use);
        }
        self.proposed = self.proposed.max(other.proposed);
        for (mine, theirs) in self.counts_from.iter_mut().zip(&other.counts_from) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// What a directory knows that a term is proposed to.
    #[must_use]
    pub fn propose(mut self, next: &Self) -> Self {
        self.proposed = self.proposed.max(next.term);
        self
    }
}

impl Members {
    /// Compares the directories of one store that were found, of `all` that it has.
    pub fn of(all: u32, found: &[Member]) -> Self {
        let mut highest = Membership::default();
        found.iter().for_each(|one| highest.join(&one.membership));
        let standing =
            |one: &Member, term| one.membership.standing(one.directory, &highest.counts_from, term);
        let counts = |one: &&Member| standing(one, 0) != Standing::Replaced;
        let term = found.iter().filter(counts).map(|one| one.membership.term).max().unwrap_or(0);
        let standings: Vec<Standing> = found.iter().map(|one| standing(one, term)).collect();
        let number = |is: fn(&Standing) -> bool| {
            u32::try_from(standings.iter().filter(|one| is(one)).count()).unwrap_or(u32::MAX)
        };
        let present = number(|one| *one != Standing::Replaced);
        let in_use = if highest.in_use == 0 { all } else { highest.in_use };
        let is_settled = present == in_use && number(|one| *one == Standing::Current) == present;
        Self { new: number(|one| *one == Standing::New), standings, highest, present, all, is_settled }
    }

    /// Whether the store may be opened with them: they know all that was ever acknowledged as deleted.
    pub fn may_open(&self) -> bool {
        crate::planted!("opens-with-any")
            || self.present.saturating_sub(self.new).saturating_mul(2) >= self.all
    }

    /// Whether they may begin a term, and acknowledge deletes in it.
    pub fn may_delete(&self) -> bool {
        self.may_open() && self.present.saturating_mul(2) > self.all
    }

    /// Whether they have begun one already, and no other directory takes part in it.
    pub fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Directories that count, of how many.
    pub fn present(&self) -> (u32, u32) {
        (self.present, self.all)
    }

    /// The term that those in use begin if they are `in_use`: what each of them knows when it has taken it.
    #[must_use]
    pub fn next(&self, in_use: u32) -> Membership {
        let term = self.highest.term.max(self.highest.proposed).saturating_add(1);
        let in_use = if in_use == self.all { 0 } else { in_use };
        Membership { term, proposed: term, in_use, counts_from: self.highest.counts_from }
    }

    /// What an empty directory knows that takes the place of the one with this number; `None` if it cannot be replaced. A term that its
    /// store begins then keeps the other one out.
    pub fn in_place_of(&self, directory: u32) -> Option<Membership> {
        let mut known = self.highest;
        let from = known.term.max(known.proposed).saturating_add(BEYOND);
        *known.counts_from.get_mut(usize::try_from(directory).ok()?)? = from;
        (known.term, known.proposed) = (0, from);
        Some(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Standing::{Behind, Current, New, Replaced};

    /// A store of a few directories, each of which may be here or not.
    struct Store(Vec<Member>);

    impl Store {
        fn new(all: u32) -> Self {
            let of = |directory| Member { directory, membership: Membership::default() };
            Self((0..all).map(of).collect())
        }

        fn with(&self, here: &[usize]) -> Members {
            self.among(here.iter().map(|&at| self.0[at]))
        }

        fn among(&self, found: impl IntoIterator<Item = Member>) -> Members {
            Members::of(self.0.len() as u32, &found.into_iter().collect::<Vec<_>>())
        }

        /// Opens with these; a power cut may come after any number of writes.
        fn open(&mut self, here: &[usize], writes: usize) -> bool {
            let members = self.with(here);
            assert!(!members.standings.contains(&Replaced));
            if members.is_settled() || !members.may_delete() {
                return members.may_delete();
            }
            let next = members.next(here.len() as u32);
            let steps = here.iter().map(|&at| (at, false)).chain(here.iter().map(|&at| (at, true)));
            for (at, takes) in steps.clone().take(writes) {
                let known = &mut self.0[at].membership;
                *known = if takes { next } else { known.propose(&next) };
            }
            writes >= steps.count()
        }
    }

    #[test]
    fn half_of_the_directories_open_a_store_and_more_than_half_delete_in_it() {
        let of = |all: u32, here: &[usize]| {
            let members = Store::new(all).with(here);
            (members.may_open(), members.may_delete(), members.is_settled())
        };
        assert_eq!(of(1, &[0]), (true, true, true));
        assert_eq!([of(2, &[0]), of(2, &[1])], [(true, false, false); 2]);
        assert_eq!([of(3, &[1]), of(3, &[0, 2])], [(false, false, false), (true, true, false)]);
        assert_eq!([of(4, &[0, 3]), of(4, &[0, 1, 3])], [(true, false, false), (true, true, false)]);
        assert_eq!(of(4, &[3, 1, 0, 2]), (true, true, true));
    }

    #[test]
    fn a_directory_that_was_away_is_behind_until_a_term_begins_with_it() {
        let mut store = Store::new(3);
        assert!(store.open(&[0, 1], 4));
        assert!(store.with(&[0, 1]).is_settled());
        assert_eq!(store.with(&[2, 0]).standings, [Behind, Current]);
        assert!(store.open(&[0, 1, 2], 6));
        assert_eq!(store.with(&[0, 1, 2]).standings, [Current; 3]);
        assert!(store.with(&[0, 1, 2]).is_settled());
        // The same number of others is another set.
        assert!(store.open(&[0, 1], 4));
        assert!(store.open(&[1, 2], 4));
        assert_eq!(store.with(&[0, 1, 2]).standings, [Behind, Current, Current]);
    }

    #[test]
    fn what_was_replaced_does_not_come_back_and_what_replaces_it_does() {
        let mut store = Store::new(3);
        assert!(store.open(&[0, 1], 4));
        let old = store.0[2];
        store.0[2].membership = store.with(&[0, 1]).in_place_of(2).unwrap();
        // Also before a term begins with it, and beside the other one.
        let both = store.among([store.0[0], old, store.0[2]]);
        assert_eq!(both.standings, [Current, Replaced, New]);
        assert!(!store.with(&[0, 1, 2]).is_settled());
        assert!(store.open(&[0, 1, 2], 6));
        for others in [&[0][..], &[1], &[0, 1]] {
            let found = others.iter().map(|&at| store.0[at]).chain([old]);
            assert_eq!(store.among(found).standings.last(), Some(&Replaced));
        }
        assert_eq!(store.with(&[0, 1, 2]).standings, [Current; 3]);
        assert_eq!(store.with(&[0, 1, 2]).in_place_of(COUNTED as u32), None);
    }

    /// What happens to a store: it is opened with these directories and the power is cut after this number of writes, or one is replaced
    /// while these are there.
    #[derive(Clone, Debug)]
    enum Step {
        Open(Vec<usize>, usize),
        Replace(usize, Vec<usize>),
    }

    fn steps(all: usize) -> Vec<Step> {
        let sets = subsets(all);
        let cuts = [0, 1, all, all + 1, usize::MAX];
        let opened = sets.iter().flat_map(|set| cuts.map(|cut| Step::Open(set.clone(), cut)));
        let replaced = sets.iter().flat_map(|set| {
            let others = (0..all).filter(|at| !set.contains(at));
            others.map(|at| Step::Replace(at, set.clone())).collect::<Vec<_>>()
        });
        opened.chain(replaced).collect()
    }

    fn subsets(all: usize) -> Vec<Vec<usize>> {
        (1..1usize << all).map(|bits| (0..all).filter(|at| bits >> at & 1 == 1).collect()).collect()
    }

    /// Every sequence of such steps, for each number of directories: who lacks what was acknowledged as deleted, and holds anything, is
    /// behind in every set with which the store opens.
    #[test]
    fn no_losses_power_cuts_and_replacements_make_a_directory_current_that_lacks_a_delete() {
        for (all, length) in [(2, 3), (3, 2), (4, 2)] {
            let steps = steps(all);
            let mut sequence = vec![0; length];
            loop {
                run(all, &sequence.iter().map(|&at| &steps[at]).collect::<Vec<_>>());
                let Some(at) = sequence.iter().position(|&at| at + 1 < steps.len()) else { break };
                sequence[at] += 1;
                sequence[..at].fill(0);
            }
        }
    }

    fn run(all: usize, sequence: &[&Step]) {
        let mut store = Store::new(all as u32);
        // What each directory knows to be deleted, a bit for each step, and what it may hold of that: what is deleted in a step was
        // stored everywhere before.
        let (mut knows, mut holds) = (vec![0u8; all], vec![u8::MAX; all]);
        for (nth, step) in sequence.iter().enumerate() {
            match step {
                Step::Open(here, cut) if store.with(here).may_open() => {
                    catch_up(&store, here, &mut knows);
                    if store.open(here, *cut) {
                        here.iter().for_each(|&at| knows[at] |= 1 << nth);
                    }
                }
                Step::Replace(at, here) if store.with(here).may_open() => {
                    store.0[*at].membership = store.with(here).in_place_of(*at as u32).unwrap();
                    (knows[*at], holds[*at]) = (0, 0);
                }
                _ => {}
            }
        }
        let deleted = knows.iter().fold(0, |all, one| all | one);
        for here in subsets(all).iter().filter(|here| store.with(here).may_open()) {
            let mut after = knows.clone();
            catch_up(&store, here, &mut after);
            let comes_back = here.iter().find(|&&at| holds[at] & deleted & !after[at] != 0);
            assert_eq!(comes_back, None, "{all} directories, {sequence:?}, then {here:?}");
        }
    }

    /// Those that are behind are told what the others know.
    fn catch_up(store: &Store, here: &[usize], knows: &mut [u8]) {
        let standings = store.with(here).standings;
        let of = |wanted: Standing| here.iter().zip(&standings).filter(move |(_, one)| **one == wanted);
        let told = of(Current).fold(0, |all, (&at, _)| all | knows[at]);
        of(Behind).chain(of(New)).for_each(|(&at, _)| knows[at] |= told);
    }
}
