//! The checker against drawings whose content is known.

use integration_tests::scene::{
    Colour, Named, Object, Place, Relation, Scene, Shape, Texture, draw, judge, read,
};
use model::RgbImage;
use proptest::prelude::*;

use crate::{assert_share, set};

/// Every so many scenes of the list are drawn.
const EVERY: usize = 8;

/// Grey levels that a decoder may be off, as noise without a generator of randomness.
fn noisy(mut picture: RgbImage) -> RgbImage {
    let mut state = 1u32;
    for level in &mut picture.data {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let noise = (state >> 24) as i32 % 21 - 10;
        *level = (i32::from(*level) + noise).clamp(0, 255) as u8;
    }
    picture
}

#[test]
fn ground_truth_is_read_back_even_under_noise() {
    let scenes: Vec<&Scene> = (set().prompts.iter().map(|entry| &entry.scene))
        .chain(set().edits.iter().map(|entry| &entry.source))
        .step_by(EVERY)
        .collect();
    let wrong: Vec<String> = scenes
        .iter()
        .filter_map(|scene| judge(&read(&noisy(draw(scene))), &scene.expectation()))
        .collect();
    assert_share("drawings read back", &wrong, scenes.len(), 1.0);
}

#[test]
fn what_a_prompt_expects_is_what_its_scene_shows_and_another_prompt_is_refused() {
    let entries: Vec<_> = set().prompts.iter().step_by(EVERY).collect();
    let mut accepted = Vec::new();
    let mut wrong = Vec::new();
    for (entry, other) in entries.iter().zip(entries.iter().cycle().skip(1)) {
        let seen = read(&draw(&entry.scene));
        wrong.extend(judge(&seen, &entry.expect));
        if judge(&seen, &other.expect).is_none() {
            accepted.push(format!("{} as {}", entry.id, other.id));
        }
    }
    assert_share("own descriptions", &wrong, entries.len(), 1.0);
    assert!(accepted.is_empty(), "wrong descriptions: {accepted:?}");
}

/// Two objects of different colours side by side or one above the other, on a background of a third colour.
fn scenes() -> impl Strategy<Value = Scene> {
    let colours = Just(Colour::ALL.to_vec()).prop_shuffle();
    let shapes = [
        prop::sample::select(Shape::ALL.to_vec()),
        prop::sample::select(Shape::ALL.to_vec()),
    ];
    let textures = prop::sample::select(vec![
        Texture::Plain,
        Texture::Striped,
        Texture::Dotted,
        Texture::Gradient,
    ]);
    let sizes = [18.0..40.0f64, 18.0..40.0];
    let offsets = [-20.0..20.0f64, -20.0..20.0];
    (colours, shapes, textures, sizes, offsets, any::<bool>()).prop_map(
        |(colours, shapes, texture, r, offset, beside)| {
            // Gray is for backgrounds only.
            let background = colours[0];
            let mut rest = colours[1..].iter().filter(|c| **c != Colour::Gray);
            let mut object = |n: usize| {
                let (along, across) = (if n == 0 { 64.0 } else { 192.0 }, 128.0 + offset[n]);
                let (x, y) = if beside {
                    (along, across)
                } else {
                    (across, along)
                };
                Object {
                    shape: shapes[n],
                    colour: *rest.next().unwrap(),
                    r: r[n],
                    x,
                    y,
                }
            };
            let relation = if beside {
                Relation::LeftOf
            } else {
                Relation::Above
            };
            Scene {
                height: 256,
                width: 256,
                background,
                texture,
                phase: 0.3,
                objects: vec![object(0), object(1)],
                triples: vec![(0, relation, 1)],
                position: None,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn a_drawn_scene_is_read_back_and_every_wrong_word_is_refused(scene in scenes()) {
        let seen = read(&draw(&scene));
        let right = scene.expectation();
        prop_assert_eq!(judge(&seen, &right), None);

        let absent = |used: &[Colour]| Colour::ALL.into_iter().find(|c| !used.contains(c)).unwrap();
        let used = [right.objects[0].colour, right.objects[1].colour, scene.background];
        let mut colour = right.clone();
        colour.objects[1].colour = absent(&used);
        let mut background = right.clone();
        background.background = Some(absent(&used));
        let mut shape = right.clone();
        shape.objects[0].shape = Shape::ALL.into_iter().find(|s| *s != right.objects[0].shape).unwrap();
        let mut swapped = right.clone();
        swapped.relations = vec![(1, right.relations[0].1, 0)];
        let mut inside = right.clone();
        inside.relations = vec![(0, Relation::Inside, 1)];
        let mut fewer = right.clone();
        fewer.objects.pop();
        fewer.relations.clear();
        let mut more = right.clone();
        more.objects.push(Named { colour: absent(&used), shape: Shape::Circle });
        let mut corner = right.clone();
        corner.position = Some(Place { row: 2, column: 2 });
        for (what, wrong) in [
            ("colour", colour),
            ("background", background),
            ("shape", shape),
            ("swapped", swapped),
            ("inside", inside),
            ("fewer", fewer),
            ("more", more),
            ("corner", corner),
        ] {
            prop_assert!(judge(&seen, &wrong).is_some(), "accepted a wrong {}", what);
        }
    }
}

#[test]
fn an_edit_that_moves_or_keeps_too_much_is_refused() {
    for entry in set().edits.iter().step_by(EVERY) {
        // Nothing was done at all.
        assert!(
            entry.judge(&read(&draw(&entry.source))).is_some(),
            "{}",
            entry.id
        );
        // The right thing was done: the source with the change.
        let mut after = entry.source.clone();
        entry.apply(&mut after);
        assert_eq!(entry.judge(&read(&draw(&after))), None, "{}", entry.id);
        // It was done, but what was left alone moved.
        after.objects.iter_mut().for_each(|object| {
            object.x += if object.x < 128.0 { 14.0 } else { -14.0 };
        });
        assert!(entry.judge(&read(&draw(&after))).is_some(), "{}", entry.id);
    }
}
