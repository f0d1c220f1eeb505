//! Stopping a request.
use base::limits::CONTROL_DEADLINE;
use proto::v1::{CancelRequest, image_service_client::ImageServiceClient};
use tonic::transport::Channel;

use crate::{error::CliError, secure::keyed, text::Console};

/// Stops requests.
pub(crate) async fn cancel(
    endpoint: &str,
    ids: Vec<String>,
    console: &Console,
) -> Result<(), CliError> {
    let mut client = ImageServiceClient::new(proto::channel::connect(endpoint).await?);
    for id in ids {
        if send_cancel(&mut client, id.clone()).await? {
            console.line(format!("{id} cancelled"))?;
        } else {
            console.line(format!("{id} had already ended"))?;
        }
    }
    Ok(())
}

/// Sends the cancel call; true when the request was still alive.
pub(crate) async fn send_cancel(
    client: &mut ImageServiceClient<Channel>,
    id: String,
) -> Result<bool, CliError> {
    let mut request = tonic::Request::new(CancelRequest { request_id: id });
    request.set_timeout(CONTROL_DEADLINE);
    Ok(client.cancel(keyed(request)).await?.into_inner().cancelled)
}
