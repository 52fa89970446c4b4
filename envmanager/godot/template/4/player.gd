extends "res://addons/envmanager/agent.gd"
## The agent: sees where it is, and goes left or right.

const WIDTH := 400.0
const SPEED := 200.0
const HOME := 20.0

var velocity := 0.0

@onready var body: Node2D = get_parent()


func begin_at(x: float) -> void:
	body.position = Vector2(x, 0)
	velocity = 0.0


func is_home() -> bool:
	return absf(body.position.x) < HOME


func observe() -> PackedFloat32Array:
	return PackedFloat32Array([2 * body.position.x / WIDTH])


func act(continuous: PackedFloat32Array, _discrete: PackedInt32Array) -> void:
	velocity = clampf(continuous[0], -1, 1) * SPEED


func heuristic() -> void:
	var to := Input.get_axis("ui_left", "ui_right") if has_window() else -signf(body.position.x)
	act(PackedFloat32Array([to]), PackedInt32Array())


func _physics_process(delta: float) -> void:
	body.position.x = clampf(body.position.x + velocity * delta, -WIDTH / 2, WIDTH / 2)
