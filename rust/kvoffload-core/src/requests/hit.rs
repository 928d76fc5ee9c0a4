//! The longest usable prefix: pure, over what is known of each group's chunks.

use super::config::Span;
use super::group::Group;

/// Which lengths of a prefix are possible.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    /// Tokens that are on the GPU already.
    pub(super) computed: u64,
    /// The longest prefix.
    pub(super) most: u64,
    /// A prefix is a multiple of this.
    pub(super) unit: u64,
    /// Also possible, though it is no multiple.
    pub(super) odd: Option<u64>,
}

impl Lengths {
    /// For a request of `total` tokens, of which at most `limit` may be loaded.
    pub(super) fn new(groups: &[Group], computed: u64, total: u64, limit: Option<u64>) -> Self {
        let unit = groups
            .iter()
            .map(|group| group.tokens_per_chunk)
            .fold(1, lcm);
        let has = |wanted: fn(&Span) -> bool| groups.iter().any(|group| wanted(&group.span));
        // The last token of a request is computed again. Full attention can go back by that one token;
        // a window would miss its first token then, and a state cannot go back.
        let full_only = !has(|span| !matches!(span, Span::Full));
        let cap = if full_only {
            total
        } else {
            total.saturating_sub(1)
        };
        let limited = limit.map_or(u64::MAX, |limit| computed.saturating_add(limit));
        let most = cap.min(limited);
        let whole = !full_only && !has(|span| matches!(span, Span::State));
        let odd = (whole && total > 0 && total.is_multiple_of(unit) && most == cap).then_some(cap);
        Self {
            computed,
            most,
            unit,
            odd,
        }
    }

    /// The longest possible prefix of at most `bound` tokens.
    fn at_most(&self, bound: u64) -> u64 {
        let bound = bound.min(self.most);
        match self.odd {
            Some(odd) if odd <= bound => odd,
            _ => bound - bound % self.unit,
        }
    }
}

/// The longest prefix, in tokens from the start, for which every group has what it needs; the number
/// of computed tokens if there is none that is longer. Also the chunk, and its group, that ruled out
/// more, if one did.
///
/// `has(group, chunk)` answers whether a chunk is there, and false for chunks without a key. It is
/// asked for chunks of full-attention groups in ascending order and no more after the first that is
/// not there.
pub(super) fn longest(
    groups: &[Group],
    lengths: &Lengths,
    mut has: impl FnMut(usize, usize) -> bool,
) -> (u64, Option<(usize, usize)>) {
    let mut bound = lengths.most;
    let mut blame = None;
    // Full attention first: one pass over its chunks bounds everything else.
    for (at, group) in groups.iter().enumerate() {
        if group.span != Span::Full {
            continue;
        }
        let target = lengths.at_most(bound);
        if target <= lengths.computed {
            return (lengths.computed, blame);
        }
        let first = (lengths.computed / group.tokens_per_chunk) as usize;
        let end = group.needed(target).end + group.proof();
        if let Some(missing) = (first..end).find(|&chunk| !has(at, chunk)) {
            blame = Some((at, missing));
            let usable = missing.saturating_sub(group.proof()) as u64;
            bound = bound.min(usable * group.tokens_per_chunk);
        }
    }
    // Then the others: a chunk that is missing rules out every prefix that reaches beyond it.
    loop {
        let target = lengths.at_most(bound);
        if target <= lengths.computed {
            return (lengths.computed, blame);
        }
        let mut next = target;
        for (at, group) in groups.iter().enumerate() {
            if group.span == Span::Full {
                continue;
            }
            let local = (lengths.computed / group.tokens_per_chunk) as usize;
            let needed = group.needed(target);
            let end = needed.end + group.proof();
            let first = needed.start.max(local);
            if let Some(missing) = (first..end).find(|&chunk| !has(at, chunk)) {
                let usable = if missing < needed.end {
                    missing
                } else {
                    needed.end - 1
                };
                next = next.min(usable as u64 * group.tokens_per_chunk);
                blame = Some((at, missing));
            }
        }
        if next == target {
            return (target, blame);
        }
        bound = next;
    }
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::config::GroupConfig;
    use super::*;

    fn group() -> impl Strategy<Value = Group> {
        let span = prop_oneof![
            2 => Just(Span::Full),
            2 => (1..80u32).prop_map(Span::Window),
            1 => (1..5u32).prop_map(|n| Span::Local(n * 8)),
            1 => Just(Span::State),
        ];
        (span, prop::bool::weighted(0.2), 0..3u32).prop_map(|(span, draft, size)| {
            let config = GroupConfig {
                id: 0,
                tokens_per_block: 8 << size,
                span,
                draft,
            };
            Group::new(config, 1, 8)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// Against the definition: every length is tried, the longest with all that is needed wins.
        #[test]
        fn it_is_the_longest_prefix_that_has_all_it_needs(
            groups in prop::collection::vec(group(), 1..4),
            holes in prop::collection::vec((0..4usize, 0..20usize), 0..6),
            computed in 0..10u64,
            total in 1..150u64,
            limit in prop::option::of(0..100u64),
        ) {
            let computed = (computed * 8).min(total);
            let has = |at: usize, chunk: usize| {
                groups[at].end_of(chunk) <= total
                    && !holes.contains(&(at, chunk))
            };
            let lengths = Lengths::new(&groups, computed, total, limit);
            let mut best = computed;
            let full_only = groups.iter().all(|g| g.span == Span::Full);
            let states = groups.iter().any(|g| g.span == Span::State);
            let unit = groups.iter().map(|g| g.tokens_per_chunk).max().unwrap();
            for length in computed + 1..=total {
                let whole = length % unit == 0 && (full_only || length < total);
                let odd = !full_only && !states && total % unit == 0 && length + 1 == total;
                if limit.is_some_and(|limit| length > computed + limit) || !(whole || odd) {
                    continue;
                }
                let all = groups.iter().enumerate().all(|(at, group)| {
                    let needed = group.needed(length);
                    let local = (computed / group.tokens_per_chunk) as usize;
                    (needed.start.max(local)..needed.end + group.proof()).all(|c| has(at, c))
                });
                if all {
                    best = length;
                }
            }
            prop_assert_eq!(longest(&groups, &lengths, has).0, best);
        }
    }
}
