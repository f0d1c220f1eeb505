//! Files that a process reads again while it runs.
use std::time::Duration;

/// Looks `every` so long for as long as it is polled. `reload` says whether anything changed and is in force now;
/// `told` hears of each change, and of each failure once until something else happens. What fails may succeed at
/// the next turn: files are replaced one after the other.
pub async fn follow<E: PartialEq>(
    every: Duration,
    mut reload: impl FnMut() -> Result<bool, E>,
    told: impl Fn(Result<(), &E>),
) {
    let mut said = None;
    loop {
        tokio::time::sleep(every).await;
        match reload() {
            Ok(false) => {}
            Ok(true) => {
                said = None;
                told(Ok(()));
            }
            Err(error) if said.as_ref() == Some(&error) => {}
            Err(error) => {
                told(Err(&error));
                said = Some(error);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::VecDeque};

    use super::*;

    #[tokio::test]
    async fn a_failure_is_told_once_until_something_else_happens() {
        let looks = [
            Ok(false),
            Err("bad"),
            Err("bad"),
            Err("worse"),
            Ok(true),
            Err("worse"),
        ];
        let mut looks = VecDeque::from(looks);
        let (done, told) = (tokio::sync::Notify::new(), RefCell::new(Vec::new()));
        let reload = || {
            let look = looks.pop_front();
            look.unwrap_or_else(|| {
                done.notify_one();
                Ok(false)
            })
        };
        let following = follow(Duration::from_millis(1), reload, |outcome| {
            told.borrow_mut().push(outcome.map_err(|error| *error));
        });
        tokio::select! {
            () = following => {}
            () = done.notified() => {}
        }
        assert_eq!(
            *told.borrow(),
            [Err("bad"), Err("worse"), Ok(()), Err("worse")]
        );
    }
}
