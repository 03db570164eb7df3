"""A replaced attribute is restored as it was: static, inherited or plain."""

from threefold.pipeline import stage
from threefold.pipeline.stage import replaced


class Parent:
    @staticmethod
    def static() -> str:
        return "static"

    def inherited(self) -> str:
        return "inherited"


class Child(Parent):
    pass


def test_attributes_are_restored() -> None:
    before = vars(Parent)["static"]
    with (
        replaced(Parent, "static", staticmethod(lambda: "other")),
        replaced(Child, "inherited", lambda self: "other"),
        replaced(stage, "__doc__", None),
    ):
        assert Parent.static() == Child().static() == Child().inherited() == "other"
        assert Parent().inherited() == "inherited" and stage.__doc__ is None
    assert vars(Parent)["static"] is before and Child().static() == "static"
    assert "inherited" not in vars(Child) and Child().inherited() == "inherited"
    assert stage.__doc__ is not None
