extends "res://addons/envmanager/agent.gd"
# The agent: sees where it is, and goes left or right.

const WIDTH := 400.0
const SPEED := 200.0
const HOME := 20.0

var velocity := 0.0

onready var body: Node2D = get_parent()


func begin_at(x: float) -> void:
	body.position = Vector2(x, 0)
	velocity = 0.0


func is_home() -> bool:
	return abs(body.position.x) < HOME


func observe() -> PoolRealArray:
	return PoolRealArray([2 * body.position.x / WIDTH])


func act(continuous: PoolRealArray, _discrete: PoolIntArray) -> void:
	velocity = clamp(continuous[0], -1, 1) * SPEED


func heuristic() -> void:
	var to = -sign(body.position.x)
	if has_window():
		to = Input.get_action_strength("ui_right") - Input.get_action_strength("ui_left")
	act(PoolRealArray([to]), PoolIntArray())


func _physics_process(delta: float) -> void:
	body.position.x = clamp(body.position.x + velocity * delta, -WIDTH / 2, WIDTH / 2)
