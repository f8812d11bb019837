"""Templates of the server, as E2B's SDK and its generated client see them."""

from e2b import Sandbox, Template
from e2b.api.client.models import Template as Listed
from e2b.api.client.models import TemplateWithBuilds


def test_a_name_exists_or_not(sandbox):
    assert Template.exists("base")
    assert not Template.exists("no-such-template")
    snapshot = sandbox.create_snapshot(name="named")
    try:
        assert Template.exists("named")
        assert not Template.exists("named:other")
    finally:
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Template.exists("named")


def test_the_one_tag_is_told(api):
    [tag] = Template.get_tags("base")
    assert tag.tag == "default"
    assert str(tag.build_id) == api.get("/templates/base").json()["buildID"]


def test_answers_are_what_the_generated_client_reads(api):
    listed = [Listed.from_dict(one) for one in api.get("/templates").json()]
    [base] = [one for one in listed if one.template_id == "base"]
    one = TemplateWithBuilds.from_dict(api.get("/templates/base").json())
    assert (one.build_id, one.names, one.public, one.is_default) == (base.build_id, ["base"], True, True)
    assert [str(build.build_id) for build in one.builds] == [base.build_id]
    info = api.post("/v2/sandboxes", json={"templateID": base.template_id, "timeout": 30})
    assert info.status_code == 201
    detail = api.get(f"/sandboxes/{info.json()['sandboxID']}").json()
    assert (detail["cpuCount"], detail["memoryMB"], detail["diskSizeMB"]) == (base.cpu_count, base.memory_mb, base.disk_size_mb)
    api.delete(f"/sandboxes/{info.json()['sandboxID']}")
