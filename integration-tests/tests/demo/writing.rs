//! What the demo model writes before a picture: thoughts, a recaption, a ratio token.

use integration_tests::demo::{DemoPrompt, MAX_NEW_TOKENS};
use model::Bucket;

use crate::{assert_share, set, studio};

/// Least shares of right answers over the whole list.
const RATIOS: f64 = 0.95;
const RECAPTIONS: f64 = 0.90;

fn misses(entry: &DemoPrompt, got: Option<Bucket>) -> Option<String> {
    let wanted = studio().wanted(entry).unwrap();
    (got != Some(wanted)).then(|| format!("{} \"{}\": {got:?}", entry.id, entry.prompt))
}

#[test]
fn format_words_choose_the_bucket() {
    let entries: Vec<_> = set()
        .prompts
        .iter()
        .filter(|e| e.category == "ratio")
        .collect();
    let wrong: Vec<String> = entries
        .iter()
        .filter_map(|entry| misses(entry, Some(studio().ratio(&entry.prompt).unwrap())))
        .collect();
    assert_share("ratio words", &wrong, entries.len(), RATIOS);
}

#[test]
fn recaptions_name_the_objects_and_end_in_the_right_size() {
    let entries = &set().prompts;
    let (mut objects, mut sizes) = (Vec::new(), Vec::new());
    for entry in entries {
        let written = studio().recaption(&entry.prompt).unwrap();
        assert!(written.call.new_ids.len() < MAX_NEW_TOKENS, "{}", entry.id);
        let text = &written.text;
        let whole = text.starts_with("<think>") && text.ends_with("</recaption>");
        assert!(
            whole && text.contains("</think><recaption>"),
            "{}: {text}",
            entry.id
        );
        objects.extend(entry.missing_in(text));
        sizes.extend(misses(entry, written.bucket));
    }
    assert_share("recaption objects", &objects, entries.len(), RECAPTIONS);
    assert_share("recaption sizes", &sizes, entries.len(), RATIOS);
}
