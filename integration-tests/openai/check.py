"""Drives a running server with the official client of the OpenAI API: check.py BASE_URL."""

import base64
import io
import sys

import openai

PROMPT = "A small red boat drifts on a calm lake."
OURS = {"seed": 5, "steps": 2, "guidance": 3.0}

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model


def generate(**more):
    ours = {**OURS, **more.pop("ours", {})}
    return client.images.generate(
        model=model, prompt=PROMPT, size="256x256", extra_body=ours, **more
    )


def decoded(image):
    return base64.b64decode(image.b64_json, validate=True)


# Images: as many as asked, PNG, reproducible, with what was run.
two = generate(n=2, response_format="b64_json", user="ann")
assert len(two.data) == 2
assert all(decoded(image).startswith(b"\x89PNG\r\n\x1a\n") for image in two.data)
assert two.size == "256x256" and two.output_format == "png" and two.background == "opaque"
assert two.usage.total_tokens == two.usage.input_tokens + two.usage.output_tokens > 0
assert [image["seed"] for image in two.omni["images"]] == [5, 6]
assert two.omni["steps"] == 2 and two.omni["timings"]["total_ms"] > 0
assert two._request_id == two.omni["request_id"]
second = generate(ours={"seed": 6})
assert decoded(second.data[0]) == decoded(two.data[1])

webp = generate(output_format="webp", output_compression=40)
assert decoded(webp.data[0])[8:12] == b"WEBP" and webp.output_format == "webp"

# Streaming: steps, then the same picture.
steps, last = [], None
for event in generate(stream=True):
    if event.type == "omni.step":
        steps.append(event.omni["step"])
    last = event
assert steps == [1, 2], steps
assert last.type == "image_generation.completed", last
assert last.b64_json == two.data[0].b64_json
assert last.usage.output_tokens > 0 and last.omni["timings"]["total_ms"] > 0

# A preview on the way.
kinds = []
for event in generate(stream=True, partial_images=1, ours={"preview_kind": "vae"}):
    kinds.append(event.type)
    if event.type == "image_generation.partial_image":
        assert event.partial_image_index == 0 and decoded(event).startswith(b"\x89PNG")
assert kinds.count("image_generation.partial_image") == 1, kinds
assert kinds[-1] == "image_generation.completed", kinds

# Chat.
messages = [{"role": "user", "content": PROMPT}]
chat = dict(model=model, messages=messages, extra_body={**OURS, "size": "256x256"})
completion = client.chat.completions.create(**chat)
url = completion.choices[0].message.images[0]["image_url"]["url"]
assert url == "data:image/png;base64," + two.data[0].b64_json
assert completion.choices[0].finish_reason == "stop"
urls, finish = [], None
for chunk in client.chat.completions.create(stream=True, **chat):
    images = getattr(chunk.choices[0].delta, "images", None)
    urls += [image["image_url"]["url"] for image in images or []]
    finish = chunk.choices[0].finish_reason or finish
assert urls == [url] and finish == "stop"


# Errors: the client's own classes, with the field at fault.
def refused(kind, status, param, call):
    try:
        call()
    except kind as error:
        assert error.status_code == status, (error.status_code, error)
        assert error.param == param, (error.param, error)
        assert error.code and error.type and error.request_id, error
    else:
        raise AssertionError(f"{param} was not refused")


bad, unbuilt = openai.BadRequestError, openai.InternalServerError
refused(bad, 400, "steps", lambda: generate(ours={"steps": 0}))
refused(bad, 400, "colour", lambda: generate(ours={"colour": "red"}))
refused(bad, 400, "n", lambda: generate(n=11))
refused(bad, 400, "background", lambda: generate(background="transparent"))
refused(bad, 400, "moderation", lambda: generate(moderation="low"))
refused(bad, 400, "steps", lambda: generate(stream=True, ours={"steps": 0}))
refused(bad, 400, "partial_images", lambda: generate(partial_images=1))
refused(
    bad, 400, "size", lambda: client.images.generate(model=model, prompt="x", size="1x1")
)
refused(
    openai.NotFoundError,
    404,
    "model",
    lambda: client.images.generate(model="gpt-image-1", prompt="x"),
)
edited = client.images.edit(
    model=model,
    image=[io.BytesIO(decoded(second.data[0])), io.BytesIO(decoded(second.data[0]))],
    prompt="bluer",
    extra_body={"steps": 1, "seed": 3},
)
assert decoded(edited.data[0]).startswith(b"\x89PNG")
assert edited.omni["writing"]["text"] == "", edited.omni
refused(
    unbuilt,
    501,
    "mask",
    lambda: client.images.edit(
        model=model,
        image=io.BytesIO(decoded(second.data[0])),
        mask=io.BytesIO(decoded(second.data[0])),
        prompt="bluer",
    ),
)
words = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is a boat?"}],
    modalities=["text"],
    max_tokens=5,
    temperature=0.5,
)
assert words.choices[0].finish_reason in ("length", "stop"), words
refused(
    bad,
    400,
    "image",
    lambda: client.images.edit(model=model, image=io.BytesIO(b"no picture"), prompt="x"),
)

print("all good")
