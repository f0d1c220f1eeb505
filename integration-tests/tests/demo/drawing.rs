//! Pictures of a fixed part of the held-out prompts.

use integration_tests::demo::{DemoPrompt, psnr};
use integration_tests::scene::{draw, judge, read};

use crate::{assert_share, set, studio};

/// Every so many prompts with one or two objects: twelve of them.
const EVERY: usize = 12;
/// How many of them there must be.
const COUNT: usize = 12;

/// The fixed subset, cut out by its places in the list alone.
fn subset() -> Vec<&'static DemoPrompt> {
    let prompts = set().prompts.iter();
    let subset: Vec<_> = prompts
        .filter(|entry| ["single", "two"].contains(&entry.category.as_str()))
        .step_by(EVERY)
        .collect();
    assert_eq!(subset.len(), COUNT);
    subset
}

/// Pictures denoised in one packed pass.
const PACKED: usize = 4;
/// Least share of right pictures where the model writes before it draws.
const INSTRUCT: f64 = 0.75;

/// Draws `entries` and returns what is wrong with them.
fn drawn(entries: &[&DemoPrompt], instruct: bool) -> Vec<String> {
    let studio = studio();
    let mut wrong = Vec::new();
    for chunk in entries.chunks(PACKED) {
        let mut jobs = Vec::new();
        for entry in chunk {
            let prompt = &entry.prompt;
            let written = instruct.then(|| studio.recaption(prompt).unwrap());
            let bucket = match &written {
                Some(written) => written.bucket.unwrap(),
                None => studio.wanted(entry).unwrap(),
            };
            jobs.push(studio.job(prompt, written.as_ref(), bucket).unwrap());
        }
        for (entry, picture) in chunk.iter().zip(studio.develop(&mut jobs).unwrap()) {
            let seen = judge(&read(&picture), &entry.expect);
            wrong.extend(seen.map(|why| format!("{} \"{}\": {why}", entry.id, entry.prompt)));
        }
    }
    wrong
}

#[test]
fn twelve_prompts_are_drawn_right() {
    let entries = subset();
    assert_share("base pictures", &drawn(&entries, false), COUNT, 1.0);
}

#[test]
fn every_other_one_is_drawn_from_the_models_own_recaption() {
    let entries: Vec<_> = subset().into_iter().skip(1).step_by(2).collect();
    let wrong = drawn(&entries, true);
    assert_share("instruct pictures", &wrong, entries.len(), INSTRUCT);
}

#[test]
fn two_edits_do_what_they_say_and_keep_the_rest() {
    let studio = studio();
    // Fixed places in the list: a new background and a new colour; `demo-eval` scores them all.
    let entries: Vec<_> = set().edits.iter().skip(2).step_by(4).take(2).collect();
    let started = entries.iter().map(|entry| studio.edit(entry).unwrap());
    let (_, mut jobs): (Vec<_>, Vec<_>) = started.unzip();
    for (entry, after) in entries.iter().zip(studio.develop(&mut jobs).unwrap()) {
        let wrong = entry.judge(&read(&after));
        assert_eq!(wrong, None, "{} \"{}\"", entry.id, entry.prompt);
    }
}

#[test]
fn the_vae_keeps_a_drawing() {
    let before = draw(&set().prompts[0].scene);
    let decibels = psnr(&before, &studio().reconstruct(&before).unwrap());
    println!("VAE: {decibels:.1} dB");
    assert!(decibels >= 30.0, "{decibels:.1} dB");
}
