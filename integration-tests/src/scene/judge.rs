//! Whether a picture shows what was asked for.

use super::read::{Reading, Seen};
use super::{Colour, Expectation, Named, Object, Place, Relation};

/// How far an object may wander in an edit that leaves it alone, in pixels.
const KEPT_WITHIN: f64 = 10.0;
/// Least distance of the centres of objects that are left of or above one another, in pixels.
const APART: f64 = 8.0;

/// What is wrong with a picture; nothing when it shows exactly the expected objects, where expected.
pub fn judge(seen: &Reading, expected: &Expectation) -> Option<String> {
    let mut have: Vec<Named> = seen.objects.iter().map(|o| o.named).collect();
    let mut want = expected.objects.clone();
    have.sort_unstable();
    want.sort_unstable();
    if have != want {
        return Some(format!("shows {} instead of {}", list(&have), list(&want)));
    }
    let find = |index: usize| {
        let named = expected.objects[index];
        seen.objects.iter().find(|o| o.named == named)
    };
    for (a, relation, b) in &expected.relations {
        let holds = matches!((find(*a), find(*b)), (Some(a), Some(b)) if related(a, *relation, b));
        if !holds {
            let (a, b) = (expected.objects[*a], expected.objects[*b]);
            return Some(format!("{} is not {relation:?} {}", name(&a), name(&b)));
        }
    }
    if let (Some(place), Some(first)) = (expected.position, find(0))
        && !stands_at(first, place, seen)
    {
        return Some(format!("{} is not at {place:?}", name(&first.named)));
    }
    match expected.background {
        Some(colour) if colour != seen.background => Some(format!(
            "the background is {} instead of {}",
            seen.background.name(),
            colour.name()
        )),
        _ => None,
    }
}

/// What is wrong with an edited picture: `after` must show `expected`, and every object of `source` must
/// still stand where it stood; `changed` says what became of one of them.
pub fn judge_edit(
    after: &Reading,
    expected: &Expectation,
    source: &[Object],
    changed: (usize, Change),
) -> Option<String> {
    if let Some(wrong) = judge(after, expected) {
        return Some(wrong);
    }
    for (n, object) in source.iter().enumerate() {
        let colour = match changed {
            (index, Change::Removed) if index == n => continue,
            (index, Change::Recoloured(colour)) if index == n => colour,
            _ => object.colour,
        };
        let named = Named {
            colour,
            shape: object.shape,
        };
        let near = |seen: &&Seen| {
            (seen.x - object.x).abs() <= KEPT_WITHIN && (seen.y - object.y).abs() <= KEPT_WITHIN
        };
        let mut same = after.objects.iter().filter(|seen| seen.named == named);
        if !same.any(|seen| near(&seen)) {
            return Some(format!("the {} moved", name(&named)));
        }
    }
    None
}

/// What an edit does to one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing: it changed something else.
    None,
    /// It is gone.
    Removed,
    /// It has this colour now.
    Recoloured(Colour),
}

fn related(a: &Seen, relation: Relation, b: &Seen) -> bool {
    let (right, down) = (b.x - a.x, b.y - a.y);
    match relation {
        Relation::Inside => a.bounds.within(&b.bounds),
        Relation::LeftOf => right > APART && right > 0.8 * down.abs(),
        Relation::Above => down > APART && down > 0.8 * right.abs(),
    }
}

fn stands_at(seen: &Seen, place: Place, picture: &Reading) -> bool {
    let third = |at: f64, length: usize, cell: u8| {
        let at = at / length as f64;
        match cell {
            0 => at < 0.46,
            1 => at > 0.32 && at < 0.68,
            _ => at > 0.54,
        }
    };
    third(seen.x, picture.width, place.column) && third(seen.y, picture.height, place.row)
}

fn name(object: &Named) -> String {
    format!("{} {}", object.colour.name(), object.shape.name())
}

fn list(objects: &[Named]) -> String {
    if objects.is_empty() {
        return "nothing".into();
    }
    objects.iter().map(name).collect::<Vec<_>>().join(", ")
}
